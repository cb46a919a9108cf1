"""The plan of only_save_strategy=true: strategy files, which follow from the model's sizes."""

from __future__ import annotations

from lite_runner.config.cluster import ranks_of
from lite_runner.config.fields import raise_faults
from lite_runner.config.options import GenerateOptions
from lite_runner.config.parallel import division_faults
from lite_runner.model import model_files
from lite_runner.plan.plan import Plan
from lite_runner.sizing.need import about_model


def plan_of_strategy(config: GenerateOptions) -> Plan:
    """only_save_strategy=true: of the sizes alone."""
    model = config.model_config()
    files = None if model else model_files.find(config)
    model = model or (files.model if files else None)
    assert model is not None
    raise_faults(list(division_faults(config, model)))
    ranks = ranks_of(config)
    source = files.whereabouts() if files else config.checkpoint_source
    lines = about_model(config, model, source) | {"writes": f"the strategy of {ranks.size} ranks"}
    return Plan(config=config, ranks=ranks, files=files, lines=lines)
