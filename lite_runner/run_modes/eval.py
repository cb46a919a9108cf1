"""run_mode=eval: the perplexity of a text."""

from __future__ import annotations

import time

from lite_runner import progress
from lite_runner.evaluation.comparison import compare_with_other
from lite_runner.evaluation.options import EvalOptions
from lite_runner.evaluation.options import eval_faults as faults
from lite_runner.evaluation.options import plan_evaluation as plan
from lite_runner.evaluation.scoring import Scored, score
from lite_runner.output.comparison import ScoreComparison, report
from lite_runner.output.report import Result, RunFolder, Timing
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass

__all__ = ["Config", "faults", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions):
    """run_mode=eval"""


def run(plan: Plan, folder: RunFolder) -> None:
    """Print and write the perplexity. Raises RunnerError, also where the backends of a comparison
    differ; KeyboardInterrupt after Ctrl-C, when what there is has been written."""
    began = time.perf_counter()
    config = plan.config
    assert isinstance(config, Config)
    scored = score(plan, folder, began, keep=config.compare_backend is not None)
    comparison = None
    try:
        if not scored.evaluation.interrupted:
            comparison = compare_with_other(config, scored, folder)
    finally:
        _write(plan, scored, folder, comparison)
    if scored.evaluation.interrupted:
        raise KeyboardInterrupt
    if comparison is not None:
        report(comparison, config, folder.path)


def _write(
    plan: Plan, scored: Scored, folder: RunFolder, comparison: ScoreComparison | None
) -> None:
    config, evaluation = plan.config, scored.evaluation
    result = Result(
        run_mode=config.run_mode,
        model=config.model_name,
        backend=config.backend,
        engine=scored.engine,
        load_checkpoint=plan.model.source,
        results=[],
        evaluation=evaluation,
        comparison=comparison,
        timing=Timing(load_s=scored.load_s, compile_s=scored.compile_s),
        peak_rss_mib=scored.peak_rss_mib,
    )
    folder.write_result(result)
    counted = "1 window" if evaluation.windows == 1 else f"{evaluation.windows} windows"
    progress.text(
        f"perplexity {evaluation.perplexity:.4f}: {evaluation.scored_tokens} of"
        f" {evaluation.tokens} tokens scored, {counted} of {evaluation.window}\n"
    )
    progress.note(
        f"load {scored.load_s:.1f} s, compile {scored.compile_s:.1f} s,"
        f" {evaluation.tok_s:.0f} tokens/s; results in {folder.path}"
    )
