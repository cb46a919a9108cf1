"""The plan of only_save_strategy=true: strategy files depend on the model's sizes alone."""

from __future__ import annotations

from dataclasses import replace

from lite_runner.config.checks import check_fits
from lite_runner.config.cluster import ranks_of
from lite_runner.config.options import GenerateOptions
from lite_runner.model.locate import locate_for_plan
from lite_runner.plan.plan import Plan
from lite_runner.sizing.need import model_lines


def plan_of_strategy(config: GenerateOptions) -> Plan:
    """The ranks and the model's sizes. Raises RunnerError."""
    files = None if config.model_config() else locate_for_plan(config)
    plan = Plan(config=config, ranks=ranks_of(config), files=files)
    check_fits(config, plan.decoder)
    source = files.location() if files else config.checkpoint_source
    writes = {"writes": f"the strategy of {plan.ranks.size} ranks"}
    return replace(plan, lines=model_lines(config, plan.decoder, source) | writes)
