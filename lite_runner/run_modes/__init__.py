"""What a run can do: a module each, found by its name, and conf/run_mode/NAME.yaml with its keys.

The module has what `RunMode` says. Nothing else knows which run modes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from lite_runner.config import compose, composed, sweep
from lite_runner.config.argv import CommandLine
from lite_runner.config.checks import common_faults
from lite_runner.config.composed import Schemas
from lite_runner.config.fields import Fault, Note, show
from lite_runner.config.groups import options_of
from lite_runner.config.schema import RunConfig
from lite_runner.distributed.rank_table_checks import rank_table_faults
from lite_runner.errors import ConfigError

if TYPE_CHECKING:
    from lite_runner.output.report import RunFolder
    from lite_runner.plan.plan import Plan


class RunMode(Protocol):
    """What a module here has."""

    Config: type[RunConfig]  # its keys: those of every run, of groups (config/options.py), its own

    @staticmethod
    def faults(config: Any) -> Iterator[Fault]:
        """What does not go together in its config; nothing is loaded."""

    @staticmethod
    def plan(config: Any) -> Plan:
        """All that is decided before a weight is read; with dry_run=true nothing is fetched.
        Raises RunnerError."""

    @staticmethod
    def run(plan: Plan, folder: RunFolder | None, *interrupted: Callable[[], bool]) -> None:
        """Do the work of a plan, or of one rank of several. `interrupted` says to a rank, before
        each step, whether all stop there. Raises RunnerError, and CutShort where Ctrl-C ended a
        generation whose results are written. `folder`: None where Config.leaves_folder is False."""


@cache
def schemas() -> Schemas:
    """The configs of the run modes."""
    return Schemas(lambda name: run_mode(name).Config, faults)


def run_mode(name: str) -> RunMode:
    """The run mode of this name, which there is."""
    return cast(RunMode, import_module(f"{__name__}.{name}"))


def faults(config: RunConfig) -> Iterator[Fault]:
    """All validation errors of a config whose values are right one by one."""
    yield from common_faults(config)
    yield from run_mode(config.run_mode).faults(config)
    yield from rank_table_faults(config)


def from_dict(raw: dict[str, Any]) -> RunConfig:
    """The config that `to_dict` made plain data of. Raises ConfigError."""
    name, known = raw.get("run_mode"), options_of("run_mode")
    if not isinstance(name, str) or name not in known:
        got = f"got {show(name)}" if "run_mode" in raw else "missing"
        raise ConfigError(f"run_mode: {got}; expected one of {', '.join(known)}")
    return run_mode(name).Config.from_dict(raw)


def heads() -> list[str]:
    """The first parts of every key a user may write."""
    return composed.heads(schemas())


def resolve(line: CommandLine) -> tuple[RunConfig, list[Note]]:
    """The run that a command line asks for, and notes for the user. Raises ConfigError with all
    validation errors."""
    return compose.resolve(line, schemas())


def jobs_of(line: CommandLine) -> list[tuple[str, RunConfig, list[Note]]]:
    """(what distinguishes it, config, notes) of each job of a sweep. Raises ConfigError with the
    validation errors of every job."""
    return sweep.jobs_of(line, schemas())
