"""An evaluation that compares two backends."""

from __future__ import annotations

from lite_runner import progress
from lite_runner.errors import RunnerError
from lite_runner.evaluation.comparison import compare_scores
from lite_runner.evaluation.options import EvalOptions
from lite_runner.evaluation.other_backend import other_backend
from lite_runner.evaluation.scored import Scored
from lite_runner.output.report import RunFolder
from lite_runner.output.score_comparison import ScoreComparison


def compare_with_other(
    config: EvalOptions, mine: Scored, folder: RunFolder
) -> ScoreComparison | None:
    """Score the text with the backend of compare_backend= too, whose files are in compare/ of the
    run folder; None where there is none. Raises RunnerError."""
    if config.compare_backend is None:
        return None
    other = other_backend(config, folder.path / "compare")
    return compare_scores(
        (config.backend, mine), (config.compare_backend, other), tolerance=config.tolerance
    )


def report(config: EvalOptions, comparison: ScoreComparison, folder: RunFolder) -> None:
    """Tell the table. Raises RunnerError where the backends differ."""
    for line in comparison.table():
        progress.note(line)
    if not comparison.same:
        raise RunnerError(
            f"compare_backend={config.compare_backend}: "
            f"{sum(one.differs for one in comparison.windows)} of {len(comparison.windows)}"
            f" windows differ from backend={config.backend} by more than "
            f"compare_tolerance={config.tolerance:g} in a token's log-likelihood",
            f"the table and {folder.path / 'result.json'} say where",
        )
