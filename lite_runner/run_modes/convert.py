"""run_mode=convert: a checkpoint of any readable format, written in another, bit for bit.

Adapters too, between PEFT's format and MindFormers', or one of them merged into the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, get_args

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.config import Invalid, invalid
from lite_runner.config.checks import adapter_errors
from lite_runner.config.schema import AdapterOptions, OverwriteOptions
from lite_runner.config.sections import RANDOM, AdapterFormat, CheckpointFormat, Release
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.model.adapters import adapters_of, with_adapter
from lite_runner.model.locate import locate_for_plan, side_files
from lite_runner.output import Result, RunFolder
from lite_runner.plan import Plan
from lite_runner.records import OutputPath, dataclass
from lite_runner.sizing import float32_bytes, model_lines
from lite_runner.system.files import readable
from lite_runner.weights.lora.adapter_reader import is_listing
from lite_runner.weights.lora.adapter_writer import write_adapters
from lite_runner.weights.write import (
    check_folder,
    check_gguf,
    check_target,
    config_file,
    convert,
    files_folder,
)

_NOT_THEIRS = ("huggingface", "peft", "gguf")  # formats that MindFormers does not read


@dataclass(frozen=True)
class ConvertMindFormers:
    release: str | float | None  # null: the output is for every release

    def errors(self) -> Iterator[Invalid]:
        """A release that is none."""
        try:
            Release.of(self.release)
        except ValueError as error:
            yield invalid("mindformers.release", f"mindformers.release: {error}")


@dataclass(frozen=True, kw_only=True)
class Config(AdapterOptions, OverwriteOptions):
    """run_mode=convert"""

    writes_floats: ClassVar[bool] = True

    convert_format: CheckpointFormat | AdapterFormat
    convert_output: OutputPath
    merge: bool
    mindformers: ConvertMindFormers | None

    @property
    def needs_checkpoint(self) -> bool:
        """Adapters are converted by the model's sizes alone."""
        of_adapters = self.convert_format in get_args(AdapterFormat)
        return not of_adapters or self.model_config() is None

    @property
    def release(self) -> Release:
        """The release of MindFormers that is to read the converted files. Raises ValueError."""
        return Release.of(self.mindformers.release if self.mindformers else None)


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of a conversion."""
    if not config.convert_output:
        yield invalid("convert_output", "convert_output is empty; give the file or folder to write")
    if config.mindformers and config.mindformers.release and config.convert_format in _NOT_THEIRS:
        yield invalid(
            ("mindformers.release", "convert_format"),
            f"mindformers.release has no effect with convert_format={config.convert_format}, which"
            " MindFormers is not meant to read",
        )
    yield from adapter_errors(config, one=True)
    keys = ("convert_format", "merge", "adapter_path")
    path, form = config.adapter_path, config.convert_format
    if config.merge and not path:
        yield invalid(keys, "merge=true needs adapter_path=, the adapter to merge")
    elif form in get_args(AdapterFormat):
        if config.merge:
            yield invalid(
                keys,
                f"convert_format={form} is a format of adapters; merge=true writes a checkpoint:"
                " ckpt,"
                " safetensors or huggingface",
            )
        elif not path:
            yield invalid(
                keys, f"convert_format={form} needs adapter_path=, the adapters to convert"
            )
    elif path and not config.merge:
        yield invalid(
            keys,
            f"convert_format={form} with adapter_path=: expected peft, mindformers or gguf to"
            " convert adapters, or merge=true to merge one into the checkpoint",
        )


def plan(config: Config) -> Plan:
    """The source and the target. With dry_run=true nothing is fetched. Raises RunnerError."""
    target, form = Path(config.convert_output).expanduser(), config.convert_format
    if form == "peft" or form == "mindformers" or form == "gguf":
        if form == "gguf" and not _is_listed(config):
            check_gguf(target, config.overwrite)
        else:
            check_folder(target, config.overwrite)
        files = None if config.model_config() else locate_for_plan(config.source)
        plan = Plan(config=config, files=files)
        names = ", ".join(adapters_of(config.adapters, plan.decoder))
        lines = {
            "run mode": config.run_mode,
            "adapters": f"{names}, of {config.adapter_path}",
            "writes": f"{target}, as {form}",
        }
        return replace(plan, lines=lines)
    check_target(target, form, config.overwrite)
    files = locate_for_plan(config.source)
    _check_has_weights(files)
    whole = with_adapter(files, config.adapters)
    size = float32_bytes(whole.model)
    lines = model_lines(config.run_mode, config.model_name, whole.model, whole.location())
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
    form = config.convert_format
    if form == "peft" or form == "mindformers" or form == "gguf":
        source = _convert_adapters(config, plan.decoder, target, form)
    else:
        source = _convert_checkpoint(config, plan.model, target, form)
    folder.write_result(Result.of_files(plan, source, began))
    progress.note(f"wrote {target}")


def _convert_checkpoint(
    config: Config, files: ModelFiles, target: Path, form: CheckpointFormat
) -> str:
    """Write the checkpoint; returns its source. Raises RunnerError."""
    assert files.path is not None
    whole = with_adapter(files, config.adapters)
    beside = _side_files(config, whole, form)
    convert(
        files.path,
        files.model,
        target,
        form,
        overwrite=config.overwrite,
        beside=beside,
        adapter=whole.adapter,
        release=config.release,
        report=progress.note,
    )
    if form != "huggingface":
        progress.note(f"wrote {files_folder(target)}: {', '.join(beside)}")
    return files.source


def _check_has_weights(files: ModelFiles) -> None:
    """Raises ConfigError for random weights."""
    if files.source == RANDOM:
        raise ConfigError(
            "run_mode=convert reads a checkpoint, got load_checkpoint=random", "load_checkpoint=DIR"
        )


def _side_files(config: Config, files: ModelFiles, form: CheckpointFormat) -> dict[str, bytes]:
    """Config and tokenizer files to write with the weights.

    Raises ArtifactError for an unreadable tokenizer that was named, or that a folder in Hugging
    Face's format needs; other formats are written without one.
    """
    try:
        return side_files(config.tokenizer, files)
    except ArtifactError as error:
        if form == "huggingface" or config.tokenizer.named:
            raise
        progress.note(f"the tokenizer is not written: {error.message}")
        return config_file(files.model)


def _is_listed(config: Config) -> bool:
    """True if several adapters are written: a listing stays one, unless adapter_id chooses."""
    return config.adapter_id is None and is_listing(Path(config.adapter_path).expanduser())


def _convert_adapters(config: Config, model: Decoder, target: Path, form: AdapterFormat) -> str:
    """Write the adapters, given the model's sizes; returns their source. Raises RunnerError."""
    adapters = adapters_of(config.adapters, model)
    for adapter in adapters.values():
        adapter.check_effective()
        if adapter.copies:
            names = ", ".join(adapter.copies)
            progress.note(f"adapter {adapter.name}: its copy of the base's {names} is left out")
    listed = _is_listed(config)
    release = config.release
    write_adapters(
        adapters, model, target, form, overwrite=config.overwrite, listed=listed, release=release
    )
    if form == "mindformers":
        names = " and ".join(f"{name}a" for name in release.adapter_names)
        progress.note(
            f"the adapters' parameters are called {names}: lora_a is for SLoRA, from MindFormers "
            "1.3 on, mindpet_delta_lora_a for its LoRA (mindformers.release= chooses)"
        )
    return config.adapter_path
