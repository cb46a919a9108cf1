"""run_mode=convert: a checkpoint of any readable format, written in another, bit for bit.

Adapters too, between PEFT's format and MindFormers', or one of them merged into the checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from lite_runner import progress
from lite_runner.config.convert_checks import ConvertOptions
from lite_runner.config.convert_checks import convert_faults as faults
from lite_runner.conversion.adapters import convert_adapters
from lite_runner.conversion.checkpoint import check_has_weights, convert_checkpoint
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.merged_adapter import adapters_of, with_adapter
from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass
from lite_runner.sizing.need import float32_bytes, model_lines, readable
from lite_runner.weights.write import check_folder, check_target

__all__ = ["Config", "faults", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(ConvertOptions):
    """run_mode=convert"""


def plan(config: Config) -> Plan:
    """What is read and written. With dry_run=true nothing is fetched. Raises RunnerError."""
    target, form = Path(config.convert_output).expanduser(), config.convert_format
    if form == "peft" or form == "mindformers":
        check_folder(target, config.overwrite)
        files = None if config.model_config() else locate_for_plan(config)
        plan = Plan(config=config, files=files)
        names = ", ".join(adapters_of(config, plan.decoder))
        lines = {
            "run mode": config.run_mode,
            "adapters": f"{names}, of {config.adapter_path}",
            "writes": f"{target}, as {form}",
        }
        return replace(plan, lines=lines)
    check_target(target, form, config.overwrite)
    files = locate_for_plan(config)
    check_has_weights(files)
    whole = with_adapter(files, config)
    size = float32_bytes(whole.model)
    lines = model_lines(config, whole.model, whole.location())
    if whole.adapter is not None:
        lines["adapter"] = f"{whole.adapter.name}, merged"
    lines["writes"] = f"{target}, as {form}: {readable(size)} where it is float32"
    return Plan(config=config, files=files, lines=lines)


def run(plan: Plan, folder: RunFolder) -> None:
    """Write `convert_output` in `convert_format`. Raises RunnerError; nothing half-written."""
    began = time.perf_counter()
    config = plan.config
    assert isinstance(config, Config)
    target = Path(config.convert_output).expanduser()
    if config.convert_format == "peft" or config.convert_format == "mindformers":
        source = convert_adapters(config, plan.decoder, target, config.convert_format)
    else:
        source = convert_checkpoint(config, plan.model, target, config.convert_format)
    folder.write_result(Result.of_files(config, source, began))
    progress.note(f"wrote {target}")
