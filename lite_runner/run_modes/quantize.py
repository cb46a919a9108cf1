"""run_mode=quantize: a checkpoint of any readable format, written with its weights as integers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from lite_runner import model_files, progress
from lite_runner.config.hf import hf_from_model_config
from lite_runner.config.plan import parameter_count, readable
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.model_files import ModelFiles
from lite_runner.report import Result, RunFolder
from lite_runner.weights.files import atomic_write, new_folder, require_space
from lite_runner.weights.quantization import describe
from lite_runner.weights.quantized_checkpoint import (
    MANIFEST,
    QuantizationManifest,
    weights_bytes,
    write_quantized,
)
from lite_runner.weights.write import check_folder


def run(config: RunConfig, folder: RunFolder) -> None:
    """Write `quantize_output`. Raises RunnerError; nothing half-written gets the final name."""
    began = time.perf_counter()
    assert config.quantize_output  # the config's checks saw to it
    target = Path(config.quantize_output).expanduser()
    _check_target(target, bool(config.overwrite))
    files = model_files.locate(config)
    # What is read is what stays: a source inside the folder would go with it.
    if files.path is not None and files.path.resolve() in (target.resolve(), *_inside(target)):
        raise ConfigError(f"quantize_output: {target} is what is to be read; choose another folder")
    beside = model_files.files_beside(config, files)
    model = files.model
    if files.path is not None and files.path.suffix == ".gguf":
        # config.json has room for all tokens that end a text, the tokenizer's files for one.
        tokenizer = model_files.tokenizer_of(config, files)
        model = replace(model, eos_token_id=model_files.end_tokens(model, tokenizer))
    tensors = files.whole()
    schemes = {
        name: tensor.integers.scheme
        for name, tensor in tensors.items()
        if tensor.integers is not None
    }
    manifest = QuantizationManifest(files.quantization, files.source, schemes)
    size = weights_bytes(model, manifest)
    progress.note(describe(tensors, files.quantization))
    with new_folder(target) as fresh:
        require_space(fresh, size)
        with progress.step("quantize", total=len(tensors), unit="tensors") as step:
            write_quantized(fresh, tensors, model, manifest, step.advance)
        beside["config.json"] = (json.dumps(hf_from_model_config(model), indent=2) + "\n").encode()
        for name, content in beside.items():
            with atomic_write(fresh / name) as file:
                file.write(content)
    folder.write_result(Result.of_files(config, files.source, began))
    floats = 4 * parameter_count(model)
    progress.note(
        f"wrote {target}: {readable(size)} in place of {readable(floats)} as float32, "
        f"{floats / size:.2f} times smaller"
        + (f"; the source has {readable(_bytes_of(files))}" if files.path else "")
    )


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


def _bytes_of(files: ModelFiles) -> int:
    """Size of the files that hold the source's weights."""
    assert files.path is not None
    if files.path.is_file():
        return files.path.stat().st_size
    suffixes = (".safetensors", ".ckpt", ".gguf")
    found = (item for item in files.path.rglob("*") if item.suffix in suffixes)
    return sum(item.stat().st_size for item in found)
