"""run_mode=predict: prompts in, completions out, streamed as they come."""

from __future__ import annotations

import time
from collections.abc import Callable

from lite_runner.config.generate_checks import ComparedOptions, PredictOptions
from lite_runner.config.generate_checks import predict_faults as faults
from lite_runner.config.schema import GenerateOptions
from lite_runner.output.report import RunFolder
from lite_runner.plan.generating import plan_generation as plan
from lite_runner.plan.plan import Plan
from lite_runner.prediction.complete import complete_share, gather, write_results
from lite_runner.prediction.side_files import save_strategy, write_side_files
from lite_runner.records import dataclass
from lite_runner.system.signals import CutShort

__all__ = ["Config", "faults", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(PredictOptions):
    """run_mode=predict"""


def run(plan: Plan, folder: RunFolder, interrupted: Callable[[], bool] | None = None) -> None:
    """Generate, print and write the results. Raises RunnerError; CutShort after Ctrl-C, when what
    there is has been written.

    Each rank calls this once all have joined; rank 0 alone writes the results. All stop where
    `interrupted`, called before every step, returns true.
    """
    began = time.perf_counter()
    config = plan.config
    assert isinstance(config, GenerateOptions)
    if config.only_save_strategy:
        save_strategy(plan, folder, began)
        return
    tokenizer = plan.tokenizer
    assert tokenizer is not None, "missing in a dry run alone"
    plan = write_side_files(plan, folder)
    if isinstance(config, ComparedOptions) and config.compare_backend is not None:
        from lite_runner.prediction.comparison import run_and_compare

        run_and_compare(plan, tokenizer, folder, began)
        return
    mine = complete_share(plan, tokenizer, folder, began, interrupted)
    whole = gather(mine, plan.ranks)
    if plan.ranks.rank == 0:
        write_results(plan, whole, tokenizer, folder, shown=len(mine.rows))
    if whole.interrupted:
        raise CutShort
