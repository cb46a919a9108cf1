"""compare_backend= of an evaluation: the log-likelihoods of two backends side by side.

The second run's process: python -m lite_runner.evaluation.comparison < job.json
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lite_runner.evaluation.options import EvalOptions, plan_evaluation
from lite_runner.evaluation.scoring import Scored, ScoredWindow, score
from lite_runner.output.comparison import (
    ComparedScorer,
    ComparedWindow,
    ScoreComparison,
    run_other,
    start,
)
from lite_runner.output.report import RunFolder
from lite_runner.system import own_process

PROGRAM = "lite_runner.evaluation.comparison"


def compare_with_other(
    config: EvalOptions, mine: Scored, folder: RunFolder
) -> ScoreComparison | None:
    """Score the text with the backend of compare_backend= too, whose files are in compare/ of the
    run folder; None where there is none. Raises RunnerError."""
    if config.compare_backend is None:
        return None
    found = run_other(PROGRAM, config, folder.path / "compare")
    other = Scored.from_dict(found["scored"])
    return compare_scores(
        (config.backend, mine), (config.compare_backend, other), tolerance=config.tolerance
    )


def compare_scores(
    mine: tuple[str, Scored], other: tuple[str, Scored], *, tolerance: float
) -> ScoreComparison:
    """Two backends, by name, that scored the same text."""
    pairs = zip(mine[1].windows, other[1].windows, strict=True)
    windows = [_window(*pair, tolerance=tolerance) for pair in pairs]
    return ScoreComparison(
        tolerance=tolerance,
        same=not any(window.differs for window in windows),
        sides=[_side(*one) for one in (mine, other)],
        windows=windows,
    )


def _window(mine: ScoredWindow, other: ScoredWindow, *, tolerance: float) -> ComparedWindow:
    ours, theirs = (np.array(one.log_likelihoods) for one in (mine, other))
    difference = np.abs(ours - theirs)
    largest = float(difference.max())
    return ComparedWindow(
        first=mine.first,
        tokens=len(ours),
        nll=[-float(ours.mean()), -float(theirs.mean())],
        difference=largest,
        token=mine.first + int(difference.argmax()),
        differs=not largest <= tolerance,
    )


def _side(backend: str, scored: Scored) -> ComparedScorer:
    found = scored.evaluation
    return ComparedScorer(
        backend=backend,
        engine=scored.engine,
        load_s=scored.load_s,
        compile_s=scored.compile_s,
        tok_s=found.tok_s,
        peak_rss_mib=scored.peak_rss_mib,
        nll=math.log(found.perplexity),
        perplexity=found.perplexity,
    )


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """The likelihoods of a job. Raises RunnerError."""
    began = time.perf_counter()
    start(job)
    plan = plan_evaluation(EvalOptions.from_dict(job["config"]))
    scored = score(plan, RunFolder(Path(job["folder"])), began, keep=True)
    return {"scored": scored.to_dict()}


if __name__ == "__main__":
    sys.exit(own_process.serve(answer))
