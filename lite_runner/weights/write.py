"""Convert a checkpoint: read any format, write MindSpore's or Hugging Face's, bit for bit."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Literal, get_args

from numpy.typing import NDArray

from lite_runner.config.hf import hf_from_model_config
from lite_runner.config.model import ModelConfig
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.weights.adapter import Adapter
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.ckpt_file import write_ckpt
from lite_runner.weights.files import atomic_write, make_folder, sync_folder
from lite_runner.weights.hugging_face import INDEX, TOKENIZER_FILES, to_hugging_face
from lite_runner.weights.merge import merged, merged_model
from lite_runner.weights.safetensors_file import write_safetensors
from lite_runner.weights.tensor import LazyTensor

__all__ = ["Format", "convert", "write_ckpt", "write_safetensors"]

Format = Literal["ckpt", "safetensors", "huggingface"]
COPIED_FILES: tuple[str, ...] = (*TOKENIZER_FILES, "generation_config.json")


def convert(
    source: Path,
    config: ModelConfig,
    target: Path,
    format: Format,
    *,
    overwrite: bool = False,
    tokenizer: Mapping[str, str] | None = None,
    adapter: Adapter | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the checkpoint `source` of the model `config` to `target`, with the same bits.

    "ckpt" and "safetensors" write one file with MindFormers' names, "huggingface" a folder with
    model.safetensors, config.json and the tokenizer: the files `tokenizer` (text by name), else
    those found beside the source. Quantized tensors become F32. An `adapter` is merged into the
    weights, which keep their type. `target` is complete or untouched.

    Raises ConfigError for a target that exists (without `overwrite`) or has the wrong suffix,
    ArtifactError for the source, EnvironmentFault where the disk is too small or read-only.
    """
    _check_target(target, format, overwrite)
    tensors: Mapping[str, LazyTensor] = open_checkpoint(source, config)
    if adapter is not None:
        tensors, config = merged(tensors, adapter, config), merged_model(config, adapter)
    tensors = with_progress(tensors, report)
    if format == "ckpt":
        write_ckpt(target, tensors)
    elif format == "safetensors":
        write_safetensors(target, tensors, {"format": "ms"})
    else:
        folder = source if source.is_dir() else source.parent
        texts = {"config.json": json.dumps(hf_from_model_config(config), indent=2) + "\n"}
        copied = COPIED_FILES
        if tokenizer is not None:  # the others would contradict it
            texts |= tokenizer
            copied = tuple(name for name in COPIED_FILES if name not in TOKENIZER_FILES)
        with filled_folder(target, {INDEX, *COPIED_FILES}) as temporary:
            theirs = to_hugging_face(tensors, config)
            write_safetensors(temporary / "model.safetensors", theirs, {"format": "pt"})
            for name, text in texts.items():
                with atomic_write(temporary / name) as file:
                    file.write(text.encode())
            for name in copied:
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, temporary / name)


def check_folder(target: Path, overwrite: bool) -> None:
    """Raise ConfigError where `target` is a file, or (without `overwrite`) a folder not empty."""
    if target.is_file():
        raise ConfigError(f"{target}: a file, expected a folder to write to")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target}: exists already", "choose another name, or overwrite=true")


def _check_target(target: Path, format: Format, overwrite: bool) -> None:
    if format not in get_args(Format):
        raise ConfigError(f"format is {format!r}, expected one of {', '.join(get_args(Format))}")
    if format == "huggingface":
        check_folder(target, overwrite)
        return
    if target.suffix != f".{format}" or target.is_dir():
        raise ConfigError(f"{target}: expected the name of a .{format} file to write")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists already", "choose another name, or overwrite=true")


def with_progress(
    tensors: Mapping[str, LazyTensor], report: Callable[[str], None]
) -> dict[str, LazyTensor]:
    """The same tensors; a line is reported for every tenth of their values that was read."""
    total = sum(_values(tensor) for tensor in tensors.values())
    done, reported = 0, 0

    def watched(tensor: LazyTensor) -> LazyTensor:
        def read() -> NDArray[Any]:
            nonlocal done, reported
            array = tensor.read()
            done += array.size
            tenths = 10 * done // max(total, 1)
            if tenths > reported:
                reported = tenths
                report(f"converted {10 * tenths} % of {len(tensors)} tensors")
            return array

        return LazyTensor(tensor.shape, tensor.dtype, read)

    return {name: watched(tensor) for name, tensor in tensors.items()}


def _values(tensor: LazyTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


@contextlib.contextmanager
def filled_folder(target: Path, ours: Set[str]) -> Iterator[Path]:
    """A folder to fill, whose files appear in `target` once all of them are written.

    Files of `ours` that were in `target` and are not written anew are removed from it.
    """
    make_folder(target.parent)
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}.", suffix=".tmp", dir=target.parent
        ) as name:
            temporary = Path(name) / target.name
            temporary.mkdir()
            yield temporary
            if target.exists():
                written = sorted(temporary.iterdir())
                for file in written:
                    file.replace(target / file.name)
                # What is left of another model there would be read together with this one.
                for stale in ours - {file.name for file in written}:
                    (target / stale).unlink(missing_ok=True)
            else:
                temporary.rename(target)
    except OSError as error:
        raise EnvironmentFault(
            f"{target}: cannot be written: {error.strerror or error}", "choose a writable folder"
        ) from error
    sync_folder(target.parent)
