"""run_mode=doctor: whether this machine can run models, and the one that is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from lite_runner.config.fields import Fault
from lite_runner.doctor import machine, model
from lite_runner.doctor.check import Check
from lite_runner.errors import EnvironmentFault
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Config(model.ModelOptions):
    """run_mode=doctor"""

    leaves_folder: ClassVar[bool] = False

    output_format: Literal["text", "json"]

    @property
    def needs_checkpoint(self) -> bool:
        """model=auto, the default here, is no model unless a checkpoint is named."""
        return False

    @property
    def names_model(self) -> bool:
        """True if a model is named, typed or in a file."""
        named = self.checkpoint_source or self.model_config() or self.runs_given_model
        return bool(named)


def faults(config: Config) -> Iterator[Fault]:
    """Nothing: what is wrong is told by the checks."""
    yield from ()


def checks(config: Config) -> Iterator[Check]:
    """Of the machine, and of the model where one is named."""
    output_dir = Path(config.output_dir).expanduser()
    limit = config.context.cache_limit
    yield from machine.machine_checks(output_dir, limit, needs_mindformers=config.in_mindformers)
    if config.names_model:
        yield from model.checks(config)


def plan(config: Config) -> Plan:
    """The checks by their names; nothing is looked at yet."""
    names = ", ".join(check.name for check in checks(config))
    return Plan(config=config, lines={"run mode": config.run_mode, "checks": names})


def run(plan: Plan, folder: None) -> None:
    """Tell what every check finds. Raises EnvironmentFault where one fails."""
    config = plan.config
    assert isinstance(config, Config)
    if not machine.run(checks(config), config.output_format):
        raise EnvironmentFault("not everything works here", "the lines behind -> say what mends it")
