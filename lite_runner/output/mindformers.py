"""Completing prompts with MindFormers' own generate()."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from lite_runner import progress
from lite_runner.backends.base import AdapterSlots
from lite_runner.backends.mindformers.process import Batch
from lite_runner.backends.mindformers.run import MindFormersRun
from lite_runner.backends.mindformers.start import OpenMindFormers
from lite_runner.config.generation import FinishReason, GenerationConfig
from lite_runner.generation import (
    Completion,
    Generation,
    GenerationTiming,
    OnFinish,
    OnLogits,
    OnToken,
    Request,
)
from lite_runner.records import dataclass

WARM_UP = 2  # tokens: a graph for the prompt, and one for the tokens after it


class MindFormersGenerator:
    """MindFormers in its process. See Generator; prompts are completed batch by batch."""

    adapters: AdapterSlots | None = None

    def __init__(self, opened: OpenMindFormers) -> None:
        self._opened = opened
        self._process, self._run = opened.process, opened.run
        self._logits = opened.work / "logits"  # those of requests with keep_logits
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
        """See Generator. A KeyboardInterrupt ends the process with what is there."""
        timing, began = GenerationTiming(), time.perf_counter()
        done: dict[int, Completion] = {}
        listeners = _Listeners(on_token, on_finish, on_logits, interrupted)
        cut = False
        try:
            for number, some in enumerate(_batches(requests, self._run)):
                batch = _RunningBatch(some, first_index, self._run, number, self._logits)
                try:
                    self._complete(batch, listeners, timing, began)
                finally:
                    done |= batch.completions()
        except (KeyboardInterrupt, _Cut) as error:
            if interrupted is not None and not isinstance(error, _Cut):
                raise
            cut = True
        for index in range(first_index, first_index + len(requests)):
            done.setdefault(index, Completion(index, 0, [], "interrupted"))
        return Generation([done[index] for index in sorted(done)], timing, cut)

    def close(self) -> None:
        self._opened.close()

    def _complete(
        self,
        batch: _RunningBatch,
        listeners: _Listeners,
        timing: GenerationTiming,
        began: float,
    ) -> None:
        first = True

        def on_step(tokens: list[tuple[int, int]], seconds: float) -> None:
            nonlocal first
            if first:
                timing.prefill_s += seconds
                timing.prefill_tokens += batch.prompt_tokens
                if timing.time_to_first_token_s is None:
                    timing.time_to_first_token_s = time.perf_counter() - began
            else:
                timing.decode_s += seconds
                timing.decode_tokens += len(tokens)
            first = False
            batch.take(tokens, listeners)
            if listeners.interrupted is not None and listeners.interrupted():
                raise _Cut

        started = time.perf_counter()
        found = self._process.generate(batch.plain(), on_step)
        if found is not None:
            timing.decode_s += time.perf_counter() - started
            timing.decode_tokens += len(found)
            batch.take_best(found, listeners)


class _Cut(Exception):
    """`interrupted` returned true."""


@dataclass(frozen=True)
class _Listeners:
    on_token: OnToken | None
    on_finish: OnFinish | None
    on_logits: OnLogits | None
    interrupted: Callable[[], bool] | None


class _RunningBatch:
    """Requests with the same options, and their tokens so far."""

    def __init__(
        self,
        requests: Sequence[Request],
        first: int,
        run: MindFormersRun,
        number: int,
        logits: Path,
    ) -> None:
        """`requests` carry their index in `name`; see `_batches`."""
        self._indices = [first + int(request.name) for request in requests]
        self._requests, self._run = requests, run
        self._options = requests[0].options
        self._limits = [
            one.options.max_sequence(len(one.prompt), run.sizes.length) - len(one.prompt)
            for one in requests
        ]
        self._tokens: list[list[int]] = [[] for _ in requests]
        self._reasons: list[FinishReason] = ["interrupted"] * len(requests)
        self._ends: list[int | None] = [None] * len(requests)
        self._seed = (self._options.seed + number) % 2**32
        self._keeps_logits = requests[0].keep_logits
        self._logits, self._read = logits, 0

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self._requests)

    def plain(self) -> Batch:
        """As MindFormers gets it: the last row is repeated until the batch is full."""
        prompts = [request.prompt.tolist() for request in self._requests]
        fill = 0 if self._run.beams > 1 else self._run.sizes.batch - len(prompts)
        self._logits.unlink(missing_ok=True)
        return Batch(
            prompts + [prompts[-1]] * fill,
            self._limits + [0] * fill,
            self._options.eos_token_id,
            self._run.unused,
            self._run.options(self._options, self._seed),
            self._logits if self._keeps_logits else None,
        )

    def take(self, tokens: Sequence[tuple[int, int]], listeners: _Listeners) -> None:
        """Add the new tokens of a step."""
        logits = self._step_logits() if self._keeps_logits else None
        for row, token in tokens:
            index = self._indices[row]
            if logits is not None and listeners.on_logits is not None:
                listeners.on_logits(index, 0, logits[row], logits[row])
            if token in self._options.eos_token_id:
                self._ends[row] = token
                self._finish(row, "stop", listeners)
                continue
            self._tokens[row].append(token)
            if listeners.on_token is not None:
                listeners.on_token(index, 0, token)
            if len(self._tokens[row]) == self._limits[row]:
                self._finish(row, "length", listeners)

    def take_best(self, tokens: Sequence[int], listeners: _Listeners) -> None:
        """Add the tokens of the best beam; what follows an end token is padding."""
        ends = self._options.eos_token_id
        length = next((at for at, token in enumerate(tokens) if token in ends), None)
        self._tokens[0] = list(tokens[: self._limits[0] if length is None else length])
        if length is not None:
            self._ends[0] = tokens[length]
        self._finish(0, "length" if length is None else "stop", listeners)

    def completions(self) -> Mapping[int, Completion]:
        """Of each request by its index, partial ones too."""
        return {index: self._completion(row) for row, index in enumerate(self._indices)}

    def _finish(self, row: int, reason: FinishReason, listeners: _Listeners) -> None:
        self._reasons[row] = reason
        if listeners.on_finish is not None:
            listeners.on_finish(self._completion(row))

    def _completion(self, row: int) -> Completion:
        return Completion(
            self._indices[row], 0, self._tokens[row], self._reasons[row], end_token=self._ends[row]
        )

    def _step_logits(self) -> Any:
        """Logits float32 [batch, vocab] of the next step that has not been read."""
        shape = (self._run.sizes.batch, self._run.model.vocab_size)
        count = shape[0] * shape[1]
        with self._logits.open("rb") as file:
            found = np.fromfile(file, np.float32, count, offset=4 * count * self._read)
        self._read += 1
        return found.reshape(shape)


def _batches(requests: Sequence[Request], run: MindFormersRun) -> Iterator[list[Request]]:
    """Consecutive requests with the same options, as many as a batch takes; each is named by its
    place."""
    named = [replace(request, name=str(place)) for place, request in enumerate(requests)]
    most = 1 if run.beams > 1 else run.sizes.batch
    for _, same in groupby(named, key=lambda request: request.options):
        some = list(same)
        yield from (some[start : start + most] for start in range(0, len(some), most))
