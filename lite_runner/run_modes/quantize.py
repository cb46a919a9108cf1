"""run_mode=quantize: a checkpoint of any readable format, written with its weights as integers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lite_runner import progress
from lite_runner.config.fields import Fault, fault
from lite_runner.config.schema import OverwriteOptions
from lite_runner.errors import ConfigError
from lite_runner.model.files import ModelFiles
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.tokenizer import side_files
from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.records import OutputPath, dataclass
from lite_runner.sizing.memory import float32_bytes, model_lines, readable, weight_bytes
from lite_runner.system.files import new_folder, require_space
from lite_runner.weights.quantization.quantize import describe
from lite_runner.weights.quantization.quantized_checkpoint import (
    MANIFEST,
    schemes_of,
    weights_bytes,
    write_quantized,
)
from lite_runner.weights.write import check_folder, write_files


@dataclass(frozen=True, kw_only=True)
class Config(OverwriteOptions):
    """run_mode=quantize"""

    quantize_output: OutputPath


def faults(config: Config) -> Iterator[Fault]:
    """Validation errors of quantizing."""
    if not config.quantize_output:
        yield fault("quantize_output", "quantize_output is empty; give the folder to write")
    if not config.quantization.rounds:
        yield fault("quant", "run_mode=quantize needs quant=a16w8, a16w4 or a8w8")


def plan(config: Config) -> Plan:
    """The checkpoint and what is written. With dry_run=true nothing is fetched. Raises
    RunnerError."""
    target = Path(config.quantize_output).expanduser()
    _check_target(target, config.overwrite)
    files = locate_for_plan(config.source)
    size = weight_bytes(files.model, "float32", files.quantization)
    lines = model_lines(config.run_mode, config.model_name, files.model, files.location())
    lines["writes"] = f"{target}: {readable(size)} as quant={files.quantization}"
    return Plan(config=config, files=files, lines=lines)


def run(plan: Plan, folder: RunFolder) -> None:
    """Write `quantize_output`. Raises RunnerError; nothing half-written gets the final name."""
    began = time.perf_counter()
    config, files = plan.config, plan.model
    assert isinstance(config, Config)
    target = Path(config.quantize_output).expanduser()
    # What is read is what stays: a source inside the folder would go with it.
    if files.path is not None and files.path.resolve() in (target.resolve(), *_inside(target)):
        raise ConfigError(f"quantize_output: {target} is what is to be read; choose another folder")
    size = _write(files, side_files(config.tokenizer, files), target)
    folder.write_result(Result.of_files(plan, files.source, began))
    floats = float32_bytes(files.model)
    progress.note(
        f"wrote {target}: {readable(size)} in place of {readable(floats)} as float32, "
        f"{floats / size:.2f} times smaller"
        + (f"; the source has {readable(files.stored_bytes())}" if files.path else "")
    )


def _write(files: ModelFiles, beside: Mapping[str, bytes], target: Path) -> int:
    """Write the weights as files.quantization has them, and other files `beside` them; returns the
    bytes of the weights. Raises RunnerError; `target` is written atomically."""
    tensors = files.whole()
    quantization, size = files.quantization, weights_bytes(files.model, schemes_of(tensors))
    progress.note(describe(tensors, quantization))
    with new_folder(target) as fresh:
        require_space(fresh, size)
        write_files(fresh, beside)
        with progress.step("quantize", total=len(tensors), unit="tensors") as step:
            write_quantized(fresh, tensors, files.model, quantization, files.source, step.advance)
    return size


def _check_target(target: Path, overwrite: bool) -> None:
    """Raise ConfigError where something is in the way that overwrite=true does not cover."""
    check_folder(target, overwrite)
    if target.is_dir() and any(target.iterdir()) and not (target / MANIFEST).is_file():
        raise ConfigError(
            f"{target}: not a quantized checkpoint, so overwrite=true does not replace it",
            "choose another name",
        )


def _inside(target: Path) -> list[Path]:
    return [item.resolve() for item in target.iterdir()] if target.is_dir() else []
