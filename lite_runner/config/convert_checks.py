"""The keys of a conversion, and their validation errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from lite_runner.config.adapter_checks import adapter_faults
from lite_runner.config.fields import Fault, fault
from lite_runner.config.options import AdapterOptions, OverwriteOptions
from lite_runner.config.quantization_checks import written_as_floats
from lite_runner.config.release import Release
from lite_runner.config.sections import AdapterFormat, CheckpointFormat, MindFormers
from lite_runner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(AdapterOptions, OverwriteOptions):
    """What to convert, and to what."""

    convert_format: CheckpointFormat | AdapterFormat
    convert_output: str
    merge: bool
    mindformers: MindFormers | None

    @property
    def needs_checkpoint(self) -> bool:
        """Adapters are converted by the model's sizes alone."""
        of_adapters = self.convert_format in get_args(AdapterFormat)
        return not of_adapters or self.model_config() is None

    @property
    def release(self) -> Release:
        """The release of MindFormers that is to read what is converted. Raises ValueError."""
        return Release.of(self.mindformers.release if self.mindformers else None)


def convert_faults(config: ConvertOptions) -> Iterator[Fault]:
    """Validation errors of a conversion."""
    if not config.convert_output:
        yield fault("convert_output", "convert_output is empty; give the file or folder to write")
    yield from written_as_floats(config)
    yield from _release_faults(config)
    yield from adapter_faults(config, one=True)
    keys = ("convert_format", "merge", "adapter_path")
    path, form = config.adapter_path, config.convert_format
    if config.merge and not path:
        yield fault(keys, "merge=true needs adapter_path=, the adapter to merge")
    elif form in get_args(AdapterFormat):
        if config.merge:
            yield fault(
                keys,
                f"convert_format={form} is of adapters; merge=true writes a checkpoint: ckpt,"
                " safetensors or huggingface",
            )
        elif not path:
            yield fault(keys, f"convert_format={form} needs adapter_path=, the adapters to convert")
    elif path and not config.merge:
        yield fault(
            keys,
            f"convert_format={form} with adapter_path=: expected peft or mindformers to convert"
            " adapters, or merge=true to merge one into the checkpoint",
        )


def _release_faults(config: ConvertOptions) -> Iterator[Fault]:
    try:
        chosen = config.release.number is not None
    except ValueError as error:
        yield fault("mindformers.release", f"mindformers.release: {error}")
        return
    form = config.convert_format
    if chosen and form in ("huggingface", "peft"):
        yield fault(
            ("mindformers.release", "convert_format"),
            f"mindformers.release has no effect with convert_format={form}, which MindFormers"
            " is not meant to read",
        )
