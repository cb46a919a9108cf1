"""Completing prompts with a backend's own loop, such as MindFormers' generate()."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from itertools import count, groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import Completer
from lite_runner.config.generation import FinishReason
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


@dataclass
class _Sequence:
    """A request, and its tokens so far."""

    request: Request
    limit: int  # most new tokens
    tokens: list[int] = field(default_factory=list)
    end_token: int | None = None


class _Interrupted(Exception):
    """The callback `interrupted` returned true."""


class CompleterGenerator:
    """A Completer as a Generator; prompts are completed batch by batch."""

    adapters: AdapterSlots | None = None

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self._sequences: dict[int, _Sequence] = {}  # running ones, by id
        self._ids = count()
        self.engine = completer.engine
        self.compile_s = 0.0

    def prepare(self) -> None:
        self.compile_s = self._completer.warm_up()

    def add(self, request: Request) -> int:
        """Queue a request and return its id."""
        id, length = next(self._ids), len(request.prompt)
        limit = request.options.max_sequence(length, self._completer.length) - length
        self._sequences[id] = _Sequence(request, limit)
        return id

    def finish(
        self, id: int, reason: FinishReason = "interrupted", index: int | None = None
    ) -> list[Finished]:
        """Finish a request now; no effect if it has finished."""
        if (one := self._sequences.pop(id, None)) is None:
            return []
        completion = Completion(0, 0, one.tokens, reason, end_token=one.end_token)
        return [Finished(id, completion)]

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
        """See Generator. A KeyboardInterrupt ends the loop; completions so far are returned."""
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
        self._completer.close()

    def _batches(self) -> Iterator[list[int]]:
        """Consecutive requests with the same options, as many as a batch takes."""
        most, ids = self._completer.slots, list(self._sequences)
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
        """Complete batch `number`."""
        rows = [self._sequences[id] for id in ids]
        options = rows[0].request.options
        prompts = [row.request.prompt.tolist() for row in rows]
        steps = count()

        def on_step(
            tokens: list[tuple[int, int]], seconds: float, logits: NDArray[np.float32] | None
        ) -> None:
            if next(steps) == 0:
                timing.prefill_s += seconds
                timing.prefill_tokens += sum(map(len, prompts))
            else:
                timing.decode_s += seconds
                timing.decode_tokens += len(tokens)
            events: list[Event] = []
            for row, token in tokens:
                events += self._events(ids[row], token, None if logits is None else logits[row])
            on_events(events)

        started = time.perf_counter()
        best = self._completer.complete(
            prompts,
            [row.limit for row in rows],
            options,
            (options.seed + number) % 2**32,
            on_step,
            keep_logits=rows[0].request.keep_logits,
        )
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
