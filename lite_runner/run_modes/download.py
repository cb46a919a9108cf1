"""run_mode=download: a model, its tokenizer and its adapters, fetched for later runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from lite_runner import progress
from lite_runner.config import Invalid, invalid
from lite_runner.config.checks import adapter_errors
from lite_runner.config.schema import AdapterOptions
from lite_runner.config.sections import RANDOM
from lite_runner.model.adapters import adapter_place, adapters_of
from lite_runner.model.locate import locate_for_plan, tokenizer_for_plan
from lite_runner.output import RunFolder
from lite_runner.plan import Plan
from lite_runner.records import dataclass
from lite_runner.sizing import model_lines
from lite_runner.system.files import readable
from lite_runner.weights.source import weights_to_fetch


@dataclass(frozen=True, kw_only=True)
class Config(AdapterOptions):
    """run_mode=download"""

    leaves_folder: ClassVar[bool] = False


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of a download."""
    if config.checkpoint_source == RANDOM:
        yield invalid("model", f"model={config.model_name} has random weights: nothing to download")
    yield from adapter_errors(config, one=False)


def plan(config: Config) -> Plan:
    """Fetch what a run of the model reads; with dry_run=true nothing. Raises RunnerError."""
    files = locate_for_plan(config.source)
    lines = model_lines(config.run_mode, config.model_name, files.model, files.location())
    if config.dry_run and (size := weights_to_fetch(config.checkpoint_source)):
        lines["downloads"] = readable(size)
    tokenizer_for_plan(config.tokenizer, files, dry_run=config.dry_run)
    if config.adapter_path and not config.dry_run:
        names = ", ".join(adapters_of(config.adapters, files.model))
        lines["adapters"] = f"{names}, of {adapter_place(config.adapter_path)}"
    if isinstance(files.path, Path):
        lines["ready"] = "runs of this model need no network"
    return Plan(config=config, files=files, lines=lines)


def run(plan: Plan, folder: RunFolder | None) -> None:
    """Report the downloaded files."""
    progress.text(plan.text())
