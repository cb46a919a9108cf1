"""run_mode=convert: a checkpoint of any readable format, written in another, bit for bit.

Adapters too, between PEFT's format and MindFormers', or one of them merged into the checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from lite_runner import model_files, progress
from lite_runner.config.schema import AdapterFormat, CheckpointFormat, RunConfig
from lite_runner.errors import ConfigError
from lite_runner.report import Result, RunFolder
from lite_runner.weights.adapter import check_effective, is_listing
from lite_runner.weights.adapter_write import write_adapters
from lite_runner.weights.checkpoint import weights_file
from lite_runner.weights.write import convert


def run(config: RunConfig, folder: RunFolder) -> None:
    """Write `convert_output` in `convert_format`. Raises RunnerError; nothing half-written."""
    began = time.perf_counter()
    assert config.convert_output and config.convert_format  # the config's checks saw to it
    target = Path(config.convert_output).expanduser()
    if config.convert_format == "peft" or config.convert_format == "mindformers":
        source = _convert_adapters(config, target, config.convert_format)
    else:
        source = _convert_checkpoint(config, target, config.convert_format)
    folder.write_result(Result.of_files(config, source, began))
    progress.note(f"wrote {target}")


def _convert_adapters(config: RunConfig, target: Path, form: AdapterFormat) -> str:
    """Write the adapters; the model is known by its sizes. Gives what they were read from."""
    model = config.model_config() or model_files.locate(config).model
    adapters = model_files.adapters_of(config, model)
    for adapter in adapters.values():
        check_effective(adapter)
        if adapter.copies:
            names = ", ".join(adapter.copies)
            progress.note(f"adapter {adapter.name}: its copy of the base's {names} is left out")
    # A list stays a list, unless one of it was asked for.
    listed = config.adapter_id is None and is_listing(Path(config.adapter_path).expanduser())
    overwrite = bool(config.overwrite)
    write_adapters(adapters, model, target, form, overwrite=overwrite, listed=listed)
    return config.adapter_path


def _convert_checkpoint(config: RunConfig, target: Path, form: CheckpointFormat) -> str:
    """Write the checkpoint, an adapter merged into it where one is given; gives its source."""
    files = model_files.locate(config)
    if files.path is None:
        raise ConfigError(
            "run_mode=convert reads a checkpoint, and load_checkpoint=random is none",
            "load_checkpoint=DIR",
        )
    adapter = model_files.with_adapter(files, config).adapter
    model, texts = files.model, None
    named = config.processor.tokenizer.tokenizer_file is not None
    if form == "huggingface" and (named or _is_gguf(files.path)):
        # No file of this tokenizer lies beside the weights, to be copied.
        tokenizer = model_files.tokenizer_of(config, files)
        texts = tokenizer.files()
        # These files have room for one end token, config.json for all.
        model = replace(model, eos_token_id=model_files.end_tokens(model, tokenizer))
    convert(
        files.path,
        model,
        target,
        form,
        overwrite=bool(config.overwrite),
        tokenizer=texts,
        adapter=adapter,
        report=progress.note,
    )
    return files.source


def _is_gguf(path: Path) -> bool:
    return weights_file(path).suffix == ".gguf"
