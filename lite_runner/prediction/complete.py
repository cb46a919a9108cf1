"""Completing the prompts of a plan, with one backend or with two to compare."""

from __future__ import annotations

from collections.abc import Callable

from lite_runner.config.predict_options import ComparedOptions
from lite_runner.output.merge import gather
from lite_runner.output.report import RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.prediction.finish import write_results
from lite_runner.prediction.replica import complete_share
from lite_runner.system.signals import CutShort
from lite_runner.text.tokenizer import Tokenizer


def complete(
    plan: Plan,
    tokenizer: Tokenizer,
    folder: RunFolder,
    began: float,
    interrupted: Callable[[], bool] | None,
) -> None:
    """Generate, print and write the results: see run_modes/predict.py. `began`: the time
    (time.perf_counter()) from which loading counts. Raises RunnerError, and CutShort."""
    config = plan.config
    if isinstance(config, ComparedOptions) and config.compare_backend is not None:
        from lite_runner.prediction.compare_run import run_and_compare

        run_and_compare(plan, tokenizer, folder, began)
        return
    mine = complete_share(plan, tokenizer, folder, began, interrupted)
    whole = gather(mine, plan.ranks)
    if plan.ranks.rank == 0:
        write_results(plan, whole, tokenizer, folder, shown=len(mine.rows))
    if whole.interrupted:
        raise CutShort
