"""run_mode=predict: prompts in, completions out, streamed as they come."""

from __future__ import annotations

import time
from collections.abc import Callable

from lite_runner.config.generate_checks import ComparedOptions
from lite_runner.config.generate_checks import PredictOptions as Config
from lite_runner.config.generate_checks import predict_faults as faults
from lite_runner.config.schema import GenerateOptions
from lite_runner.output.completions import complete
from lite_runner.output.report import RunFolder
from lite_runner.output.strategy_files import save_strategy, write_side_files
from lite_runner.plan.generating import plan_generation as plan
from lite_runner.plan.plan import Plan

__all__ = ["Config", "faults", "plan", "run"]


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
    plan = write_side_files(plan, folder)
    if isinstance(config, ComparedOptions) and config.compare_backend is not None:
        from lite_runner.output.comparison import compared

        with compared(plan, folder):
            complete(plan, folder, began, interrupted)
    else:
        complete(plan, folder, began, interrupted)
