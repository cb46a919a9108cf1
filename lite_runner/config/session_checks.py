"""Validation errors of run modes that load a model for prompts that come later."""

from __future__ import annotations

from collections.abc import Iterator

from lite_runner.config.adapter_checks import adapter_faults
from lite_runner.config.checks import strategy_faults
from lite_runner.config.fields import Fault
from lite_runner.config.ge import ge_faults
from lite_runner.config.offline_checks import offline_faults
from lite_runner.config.options import SessionOptions
from lite_runner.config.sampling_checks import sampling_faults


def session_faults(config: SessionOptions) -> Iterator[Fault]:
    """What their keys have wrong, alone or with each other."""
    yield from sampling_faults(config, config.generation(), vars(config))
    yield from adapter_faults(config, one=False)
    if not config.runs_given_model:
        yield from strategy_faults(config)
    yield from offline_faults(config)
    yield from ge_faults(config)
