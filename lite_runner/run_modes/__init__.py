"""The registry of run modes: run_mode=NAME is the module NAME of this folder.

A run mode is that module, which implements the protocol `RunMode`, and conf/run_mode/NAME.yaml with
its defaults. To add one, add both: no list names them. The order of a run is

    config, notes = resolve(line)            # typed keys -> Config, all validation errors at once
    plan = run_mode(config.run_mode).plan(config)
    run_mode(config.run_mode).run(plan, folder)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from lite_runner.config import Invalid, Note, compose, show
from lite_runner.config.argv import CommandLine
from lite_runner.config.checks import common_errors, mindformers_available_errors
from lite_runner.config.compose import Schemas
from lite_runner.config.groups import options_of
from lite_runner.config.parallel import TABLE_VARIABLE, started_by_launcher
from lite_runner.config.schema import ExportedOptions, RunConfig
from lite_runner.errors import ConfigError
from lite_runner.system import environment

if TYPE_CHECKING:
    from lite_runner.output import RunFolder
    from lite_runner.plan import Plan


class RunMode(Protocol):
    """The protocol of the modules of this folder."""

    Config: type[RunConfig]  # groups of keys (config/schema.py) as bases, and its own keys

    @staticmethod
    def errors(config: Any) -> Iterator[Invalid]:
        """Validation errors of combinations of keys; nothing is loaded."""

    @staticmethod
    def plan(config: Any, *tokens: Sequence[list[int]]) -> Plan:
        """Resolve a config: everything that is decided before weights are read. With dry_run=true
        nothing is fetched. A rank passes the token ids of all prompts, if any, as planned by the
        first rank of its machine. Raises RunnerError."""

    @staticmethod
    def run(plan: Plan, folder: RunFolder | None, *interrupted: Callable[[], bool]) -> None:
        """Execute a plan, in this process or as one rank of several; results go to `folder`,
        which is None where Config.leaves_folder is false.

        A rank calls `interrupted` before each step: true where all ranks stop. Raises RunnerError,
        and CutShort where Ctrl-C ended a generation whose results have been written.
        """


@cache
def schemas() -> Schemas:
    """The configs of the run modes, for lite_runner.config."""
    return Schemas(lambda name: run_mode(name).Config, errors, notes)


def run_mode(name: str) -> RunMode:
    return cast(RunMode, import_module(f"{__name__}.{name}"))


def errors(config: RunConfig) -> Iterator[Invalid]:
    """All validation errors of a config whose values are valid one by one."""
    yield from common_errors(config)
    yield from mindformers_available_errors(config)
    yield from run_mode(config.run_mode).errors(config)
    named = config.parallel.rank_table_file
    if config.use_parallel and (named or (named is None and TABLE_VARIABLE in os.environ)):
        from lite_runner.distributed.rank_table import rank_table_errors, used_table

        if table := used_table(config.parallel, config.context, starts=config.starts_ranks):
            yield from rank_table_errors(table, config.ranks)
    if isinstance(config, ExportedOptions) and config.infer.has_ge_options:
        from lite_runner.backends.lite.ge import ge_errors

        yield from ge_errors(config.infer)


def notes(config: RunConfig) -> list[str]:
    """Notes for the user about a valid config."""
    found = []
    # The number of another launcher's ranks on this machine is not known yet: see app.py.
    if not started_by_launcher():
        note = environment.threads_beyond(config.context.threads, config.processes_here)
        found += [note] if note else []
    if isinstance(config, ExportedOptions) and config.infer.has_ge_options:
        from lite_runner.backends.lite.ge import ge_notes

        found += ge_notes(config.infer)
    if config.run_mode == "finetune":
        from lite_runner.training.options import TrainOptions

        assert isinstance(config, TrainOptions)
        found += config.finetune.without_effect()
    return found


def from_dict(raw: dict[str, Any]) -> RunConfig:
    """The inverse of `RunConfig.to_dict`. Raises ConfigError."""
    name, known = raw.get("run_mode"), options_of("run_mode")
    if not isinstance(name, str) or name not in known:
        got = f"got {show(name)}" if "run_mode" in raw else "missing"
        raise ConfigError(f"run_mode: {got}; expected one of {', '.join(known)}")
    return run_mode(name).Config.from_dict(raw)


def heads() -> list[str]:
    """The first part of every dotted key that a user may type."""
    return schemas().heads


def resolve(line: CommandLine) -> tuple[RunConfig, list[Note]]:
    """The run that a command line asks for, and notes for the user. Raises ConfigError with all
    validation errors."""
    return compose.resolve(line, schemas())
