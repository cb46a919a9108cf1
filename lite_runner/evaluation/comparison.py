"""Two backends side by side: the likelihood of a text, speed, memory."""

from __future__ import annotations

import math

import numpy as np

from lite_runner.evaluation.scored import Scored, ScoredWindow
from lite_runner.output.score_comparison import ComparedScorer, ComparedWindow, ScoreComparison


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
