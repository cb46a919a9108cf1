"""Completing prompts with MindFormers' own generate()."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from itertools import count, groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.backends.mindformers.process import Batch
from lite_runner.backends.mindformers.run import OpenMindFormers
from lite_runner.config.generation import FinishReason, GenerationConfig
from lite_runner.generation import (
    Completion,
    Event,
    Finished,
    Generation,
    GenerationTiming,
    OnFinish,
    OnLogits,
    OnToken,
    Request,
    Run,
    Token,
)
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from lite_runner.backends.adapter_slots import AdapterSlots

WARM_UP = 2  # tokens: a graph for the prompt, and one for the tokens after it


@dataclass
class _Sequence:
    """A request, and its tokens so far."""

    request: Request
    limit: int  # most new tokens
    tokens: list[int] = field(default_factory=list)
    end_token: int | None = None


class _Interrupted(Exception):
    """The callback `interrupted` returned true."""


class MindFormersGenerator:
    """MindFormers in its process. See Generator; prompts are completed batch by batch."""

    adapters: AdapterSlots | None = None

    def __init__(self, opened: OpenMindFormers) -> None:
        self._opened = opened
        self._process, self._run = opened.process, opened.run
        self._logits = opened.work / "logits"  # those of requests with keep_logits
        self._sequences: dict[int, _Sequence] = {}  # running ones, by id
        self._ids = count()
        self.engine = opened.engine
        self.compile_s = 0.0

    def prepare(self) -> None:
        """Complete a prompt of one token, or as few as the model takes."""
        limit = min(WARM_UP, self._run.sizes.length - len(self._run.fill))
        if limit < 1 or self._run.beams > 1:
            return
        began = time.perf_counter()
        rows = self._run.sizes.batch
        options = self._run.options(GenerationConfig(), seed=0)
        batch = Batch([self._run.fill] * rows, [limit] * rows, (), self._run.unused, options)
        with progress.step("compile"):
            self._process.generate(batch, lambda tokens, seconds: None)
        self.compile_s = time.perf_counter() - began

    def add(self, request: Request) -> int:
        """Queue a request and return its id."""
        id, length = next(self._ids), len(request.prompt)
        limit = request.options.max_sequence(length, self._run.sizes.length) - length
        self._sequences[id] = _Sequence(request, limit)
        return id

    def finish(
        self, id: int, reason: FinishReason = "interrupted", index: int | None = None
    ) -> list[Finished]:
        """Finish a request now; no effect if it has finished."""
        if (one := self._sequences.pop(id, None)) is None:
            return []
        made = Completion(0, 0, one.tokens, reason, end_token=one.end_token)
        return [Finished(id, made)]

    def generate(
        self,
        requests: Sequence[Request],
        *,
        first_index: int = 0,
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
        on_logits: OnLogits | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Generation:
        """See Generator. A KeyboardInterrupt ends the process; completions so far are returned."""
        timing, began, cut = GenerationTiming(), time.perf_counter(), False
        run = Run(self, first_index, on_token, on_finish, on_logits)

        def on_events(events: list[Event]) -> None:
            if timing.time_to_first_token_s is None and isinstance(events[0], Token):
                timing.time_to_first_token_s = time.perf_counter() - began
            run.events = events
            run.process()
            if interrupted is not None and interrupted():
                raise _Interrupted

        try:
            for request in requests:
                run.add(request)
            for number, ids in enumerate(self._batches()):
                self._complete(ids, number, timing, on_events)
        except (KeyboardInterrupt, _Interrupted) as error:
            if interrupted is not None and isinstance(error, KeyboardInterrupt):
                raise
            cut = True
        finally:
            run.end()
        return Generation(run.completions(), timing, cut)

    def close(self) -> None:
        self._opened.close()

    def _batches(self) -> Iterator[list[int]]:
        """Consecutive requests with the same options, as many as a batch takes."""
        most = 1 if self._run.beams > 1 else self._run.sizes.batch
        ids = list(self._sequences)
        for _, same in groupby(ids, key=lambda id: self._sequences[id].request.options):
            some = list(same)
            yield from (some[start : start + most] for start in range(0, len(some), most))

    def _complete(
        self,
        ids: Sequence[int],
        number: int,
        timing: GenerationTiming,
        on_events: Callable[[list[Event]], None],
    ) -> None:
        """Complete batch `number`, whose last row is repeated until it is full."""
        rows = [self._sequences[id] for id in ids]
        options, keeps_logits = rows[0].request.options, rows[0].request.keep_logits
        prompts = [row.request.prompt.tolist() for row in rows]
        fill = 0 if self._run.beams > 1 else self._run.sizes.batch - len(rows)
        self._logits.unlink(missing_ok=True)
        batch = Batch(
            prompts + [prompts[-1]] * fill,
            [row.limit for row in rows] + [0] * fill,
            options.eos_token_id,
            self._run.unused,
            self._run.options(options, (options.seed + number) % 2**32),
            self._logits if keeps_logits else None,
        )
        steps = count()

        def on_step(tokens: list[tuple[int, int]], seconds: float) -> None:
            step = next(steps)
            if step == 0:
                timing.prefill_s += seconds
                timing.prefill_tokens += sum(map(len, prompts))
            else:
                timing.decode_s += seconds
                timing.decode_tokens += len(tokens)
            logits = self._step_logits(step) if keeps_logits else None
            events: list[Event] = []
            for row, token in tokens:
                events += self._events(ids[row], token, None if logits is None else logits[row])
            on_events(events)

        started = time.perf_counter()
        best = self._process.generate(batch, on_step)
        if best is not None:  # of beams; padding follows an end token
            timing.decode_s += time.perf_counter() - started
            timing.decode_tokens += len(best)
            ended = next((at for at, one in enumerate(best) if one in options.eos_token_id), None)
            rows[0].tokens = best[: rows[0].limit if ended is None else ended]
            rows[0].end_token = None if ended is None else best[ended]
            on_events([*self.finish(ids[0], "length" if ended is None else "stop")])

    def _events(self, id: int, token: int, logits: NDArray[np.float32] | None) -> list[Event]:
        """Take a new token of a sequence."""
        one = self._sequences[id]
        if token in one.request.options.eos_token_id:
            one.end_token = token
            count = len(one.tokens) + 1
            return [Token(id, 0, token, count, True, logits, logits), *self.finish(id, "stop")]
        one.tokens.append(token)
        ended = self.finish(id, "length") if len(one.tokens) == one.limit else []
        return [Token(id, 0, token, len(one.tokens), False, logits, logits), *ended]

    def _step_logits(self, step: int) -> NDArray[np.float32]:
        """Logits [batch, vocab] of a step."""
        shape = (self._run.sizes.batch, self._run.model.vocab_size)
        size = shape[0] * shape[1]
        with self._logits.open("rb") as file:
            return np.fromfile(file, np.float32, size, offset=4 * size * step).reshape(shape)
