"""run_mode=predict: prompts in, completions out, streamed as they come."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from lite_runner.config.compare_checks import predict_faults as faults
from lite_runner.config.options import GenerateOptions
from lite_runner.config.predict_options import PredictOptions
from lite_runner.model.tokenizer import tokenizer_of
from lite_runner.output.merge import seed_of_all
from lite_runner.output.report import RunFolder
from lite_runner.plan.generating import plan_generation as plan
from lite_runner.plan.job import with_run_seed
from lite_runner.plan.plan import Plan
from lite_runner.prediction.complete import complete
from lite_runner.prediction.side_files import save_strategy, write_side_files
from lite_runner.records import dataclass

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
    config = seed_of_all(config, plan.ranks)
    plan = replace(plan, config=config, job=with_run_seed(plan.work, config))
    plan = write_side_files(plan, folder)
    tokenizer = plan.tokenizer or tokenizer_of(config, plan.model)
    complete(plan, tokenizer, folder, began, interrupted)
