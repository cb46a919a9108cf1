"""Scoring the text of a plan with one backend."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lite_runner.evaluation.opening import open_scorer
from lite_runner.evaluation.options import EvalOptions
from lite_runner.evaluation.perplexity import Window, evaluate
from lite_runner.model.finite import explained_nonfinite
from lite_runner.output.report import Evaluation, RunFolder, peak_rss_mib
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class ScoredWindow:
    """The tokens first .. of the text, and the log-likelihood of each."""

    first: int
    log_likelihoods: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The text as a backend scored it."""

    evaluation: Evaluation
    windows: Sequence[ScoredWindow]  # those that are done; none unless asked for
    engine: str
    load_s: float
    compile_s: float
    peak_rss_mib: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, of which `from_dict` makes an equal one."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Scored:
        """What `to_dict` gave."""
        windows = [ScoredWindow(**one) for one in plain["windows"]]
        evaluation = Evaluation(**plain["evaluation"])
        return cls(**{**plain, "evaluation": evaluation, "windows": windows})


def score(plan: Plan, folder: RunFolder, began: float, *, keep: bool = False) -> Scored:
    """Load the model of a plan and score its text; `keep`: with the likelihood of each token.
    `began`: the time (time.perf_counter()) from which loading counts. Raises RunnerError."""
    config, files, job = plan.config, plan.model, plan.work
    assert isinstance(config, EvalOptions)
    ids = np.array(job.tokens[0], np.int32)
    size, stride = config.window_of(files.model)
    kept: list[ScoredWindow] = []

    def on_window(window: Window, found: NDArray[np.float64]) -> None:
        kept.append(ScoredWindow(first=window.first, log_likelihoods=found.tolist()))

    scorer = open_scorer(plan, folder)
    load_s = plan.seconds + time.perf_counter() - began
    with closing(scorer), explained_nonfinite(files):
        evaluation = evaluate(scorer, ids, size, stride, on_window if keep else None)
        peak = peak_rss_mib()  # with the processes of the engine
    return Scored(
        evaluation=replace(evaluation, quant=str(files.quantization)),
        windows=kept,
        engine=scorer.engine,
        load_s=load_s,
        compile_s=scorer.compile_s,
        peak_rss_mib=peak,
    )
