"""run_mode=convert: a checkpoint of any readable format, written in another, bit for bit."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from lite_runner import model_files, progress
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.report import Result, RunFolder, Timing
from lite_runner.weights.checkpoint import weights_file
from lite_runner.weights.write import convert


def run(config: RunConfig, folder: RunFolder) -> None:
    """Write `convert_output` in `convert_format`. Raises RunnerError; nothing half-written."""
    began = time.perf_counter()
    files = model_files.locate(config)
    if files.path is None:
        raise ConfigError(
            "run_mode=convert reads a checkpoint, and load_checkpoint=random is none",
            "load_checkpoint=DIR",
        )
    assert config.convert_output and config.convert_format  # the config's checks saw to it
    target = Path(config.convert_output).expanduser()
    model, texts = files.model, None
    named = config.processor.tokenizer.tokenizer_file is not None
    if config.convert_format == "huggingface" and (named or _is_gguf(files.path)):
        # No file of this tokenizer lies beside the weights, to be copied.
        tokenizer = model_files.tokenizer_of(config, files)
        texts = tokenizer.files()
        # These files have room for one end token, config.json for all.
        model = replace(model, eos_token_id=model_files.end_tokens(model, tokenizer))
    convert(
        files.path,
        model,
        target,
        config.convert_format,
        overwrite=bool(config.overwrite),
        tokenizer=texts,
        report=progress.note,
    )
    folder.write_result(
        Result(
            run_mode=config.run_mode,
            model=config.model_name,
            backend=config.backend,
            engine="none",
            load_checkpoint=files.source,
            results=[],
            timing=Timing(load_s=time.perf_counter() - began),
        )
    )
    progress.note(f"wrote {target}")


def _is_gguf(path: Path) -> bool:
    return weights_file(path).suffix == ".gguf"
