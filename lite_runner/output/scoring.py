"""Perplexity: the log-likelihood of a text, window by window."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from lite_runner import progress
from lite_runner.backends import Backend, Completer, seat
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import NonFiniteError, RunnerError
from lite_runner.generation import Engine, Request
from lite_runner.model import explained_nonfinite
from lite_runner.output import Evaluation, Result, RunFolder, Timing, peak_rss_mib
from lite_runner.plan import Plan
from lite_runner.plan.resources import open_run
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray

LIKELIHOODS = "likelihoods.f64"  # file of the log-likelihoods of all scored tokens, in order


class BackendScorer:
    """Computes the log-likelihood of a text."""

    def __init__(self, backend: Backend) -> None:
        self._engine = Engine(backend, prefix_cache=False)
        self.engine = backend.info.engine

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        return self._engine.compile_s

    def log_likelihoods(self, ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """Of each of ids[1:] given those before it [n - 1]. Raises RunnerError."""
        request = Request(ids, GenerationConfig(max_new_tokens=0, prompt_logprobs=0))
        outcome = self._engine.generate([request])
        if outcome.interrupted:
            raise KeyboardInterrupt
        logprobs = outcome.completions[0].prompt_logprobs
        assert logprobs is not None
        return logprobs.chosen

    def close(self) -> None:
        self._engine.close()


class CompleterScorer:
    """A backend with a loop of its own, as a BackendScorer."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self.engine = completer.engine
        self.compile_s = 0.0

    def log_likelihoods(self, ids: NDArray[np.int32]) -> NDArray[np.float64]:
        if not self.compile_s:
            began = time.perf_counter()
            with progress.step("compile", phase="compile"):
                self._score(ids)
            self.compile_s = time.perf_counter() - began
        return self._score(ids)

    def close(self) -> None:
        self._completer.close()

    def _score(self, ids: NDArray[np.int32]) -> NDArray[np.float64]:
        return np.array(self._completer.score(ids.tolist()))


Scorer: TypeAlias = BackendScorer | CompleterScorer


@dataclass(frozen=True)
class Window:
    """Tokens start .. end of the text, of which `first` and those behind it count."""

    start: int
    first: int
    end: int


# A window, and the log-likelihood of each token that counts in it [end - first].
OnWindow: TypeAlias = "Callable[[Window, NDArray[np.float64]], None]"


def windows(tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Windows over a text of so many tokens: every token counts once, in the first window that has
    one before it. Without an overlap the first token of a window is context and never counts.

    A last window of a single token, which counts nothing, is left out.
    """
    counted = 0
    for start in range(0, tokens, stride):
        end = min(start + size, tokens)
        first = max(counted, start + 1)
        if first < end:
            yield Window(start, first, end)
        counted = end
        if end == tokens:
            return


def evaluate(
    scorer: Scorer,
    ids: NDArray[np.int32],
    size: int,
    stride: int,
    on_window: OnWindow | None = None,
) -> Evaluation:
    """The perplexity of a text in token ids [n], n >= 2; `on_window` gets each scored window.
    Ctrl-C ends it with the windows so far, or is raised if there are none. Raises RunnerError if a
    likelihood is NaN.
    """
    total, scored, computed, done = 0.0, 0, 0, 0
    interrupted = False
    began, compiled = time.perf_counter(), scorer.compile_s
    try:
        with progress.step("score", len(ids), "tokens") as step:
            for window in windows(len(ids), size, stride):
                found = scorer.log_likelihoods(ids[window.start : window.end])
                counted = found[window.first - window.start - 1 :]
                if not np.isfinite(counted).all():
                    place = window.first + int(np.argmin(np.isfinite(counted)))
                    raise NonFiniteError(
                        f"the likelihood of token {place} is {counted[place - window.first]}",
                        "try another precision: model.model_config.compute_dtype=float32"
                        " kv_cache=fp32",
                    )
                total += float(counted.sum())
                scored += len(counted)
                computed += window.end - window.start
                done += 1
                if on_window is not None:
                    on_window(window, counted)
                step.advance(len(counted) + (window.first == window.start + 1))
    except KeyboardInterrupt:
        if not done:
            raise
        interrupted = True
    seconds = time.perf_counter() - began - (scorer.compile_s - compiled)
    mean = -total / scored
    try:
        perplexity = math.exp(mean)
    except OverflowError:
        raise RunnerError(
            f"the perplexity overflows: exp({mean:.0f})",
            "check that load_checkpoint= is the model of model=, and that the text suits it",
        ) from None
    return Evaluation(
        perplexity=perplexity,
        tokens=len(ids),
        scored_tokens=scored,
        windows=done,
        window=size,
        stride=stride,
        seconds=seconds,
        tok_s=computed / seconds,
        interrupted=interrupted,
    )


def score(plan: Plan, size: int, stride: int, folder: RunFolder, began: float) -> Result:
    """Load the model of a plan and score its text in windows of `size` tokens. MindFormers' yaml
    stays in `folder`, and the log-likelihood of each token in its folder of values, if it has one.

    `began`: the time (time.perf_counter()) from which loading counts. Raises RunnerError.
    """
    files, ids = plan.model, np.array(plan.work.tokens[0], np.int32)

    def keep(_: Window, found: NDArray[np.float64]) -> None:
        assert folder.values is not None
        with (folder.values / LIKELIHOODS).open("ab") as file:
            file.write(found.tobytes())

    scorer: Scorer
    opened = open_run(plan, plan.work, folder.path)
    scorer = CompleterScorer(opened) if isinstance(opened, Completer) else BackendScorer(opened)
    load_s = plan.seconds + time.perf_counter() - began
    with closing(scorer), explained_nonfinite(files):
        evaluation = evaluate(scorer, ids, size, stride, keep if folder.values else None)
        peak = peak_rss_mib()  # with the processes of the engine
    return Result.of(
        plan,
        files.source,
        engine=scorer.engine,
        evaluation=replace(evaluation, quant=str(seat(plan.settings.backend).quantization(files))),
        timing=Timing(load_s=load_s, compile_s=scorer.compile_s),
        peak_rss_mib=peak,
    )
