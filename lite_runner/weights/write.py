"""Convert a checkpoint of any format to MindSpore's or Hugging Face's, bit for bit."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import architecture_of, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import CheckpointFormat, Release
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.system.files import atomic_write, make_folder, sync_folder, temporary_folder
from lite_runner.weights import DType, LazyTensor, cast, narrowed, watched, widened
from lite_runner.weights.checkpoint import FILES, config_folder, gguf_at, open_checkpoint
from lite_runner.weights.formats import INDEX, TOKENIZER_FILES, hf_from_model_config
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.formats.hugging_face import to_hugging_face
from lite_runner.weights.formats.mindformers import to_mindformers
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.lora.adapter import Adapter, merged, merged_model
from lite_runner.weights.quantization.quantized_checkpoint import MANIFEST

HEAD = "lm_head.weight"
HEAD_NOTE = (
    f"{HEAD} is written, though it is the embedding: before release 1.3 MindFormers cannot tie the "
    "two, and would compute with a random head (mindformers.release=1.3 leaves it out)"
)
COPIED_FILES: tuple[str, ...] = ("config.json", *TOKENIZER_FILES, "generation_config.json")


def convert(
    source: Path,
    config: Decoder,
    target: Path,
    format: CheckpointFormat,
    *,
    overwrite: bool = False,
    beside: Mapping[str, bytes] | None = None,
    adapter: Adapter | None = None,
    release: Release = Release(),  # noqa: B008  (frozen)
    dtype: DType | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Convert the checkpoint `source` of the model `config` to `target`, bit for bit.

    "ckpt" and "safetensors" write one file with MindFormers' names, "huggingface" a folder with
    model.safetensors, where vectors of a GGUF file get the 16 bits of its matrices if that loses
    nothing. The small files `beside` (content by name; None: config.json, and the
    tokenizer found beside the source) lie in that folder, or beside the file in TARGET.files.
    Quantized tensors become F32. An `adapter` is merged into the weights, which keep their type
    unless a `dtype` is given.
    MindFormers' names are for its `release`: a tied head is written for one that cannot tie it.
    `target` is complete or untouched.

    Raises ConfigError for a target that exists (without `overwrite`) or has the wrong suffix,
    ArtifactError for the source, EnvironmentFault where the disk is too small or read-only.
    """
    check_target(target, format, overwrite)
    if format == "huggingface":
        check_hugging_face(config)
    tensors: Mapping[str, LazyTensor] = open_checkpoint(source, config)
    if adapter is not None:
        tensors, config = merged(tensors, adapter, config), merged_model(config, adapter)
    if format != "huggingface":
        tensors = with_head(tensors, config, release, report)
    if format == "huggingface" and dtype is None and gguf_at(source) is not None:
        tensors = narrow(tensors)
    if dtype is not None:
        tensors = {name: cast(name, tensor, dtype) for name, tensor in tensors.items()}
    tensors = with_progress(tensors, report)
    if beside is None:
        beside = {**copied_files(source), **config_file(config)}
    write_model(target, format, tensors, config, beside)


def check_hugging_face(model: Decoder) -> None:
    """Raise ConfigError, or ArtifactError, where transformers has no such model."""
    hf_from_model_config(model)  # does the format have the family?
    if what := architecture_of(model).not_theirs(model):
        raise ConfigError(
            f"convert_format=huggingface: transformers' {model.architecture} has no {what}",
            "convert_format=ckpt or convert_format=safetensors",
        )


def with_head(
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    release: Release = Release(),  # noqa: B008  (frozen)
    report: Callable[[str], None] = lambda line: None,
) -> Mapping[str, LazyTensor]:
    """Tensors with a tied head beside them, if the release of MindFormers cannot tie it."""
    if not release.needs_head(model):
        return tensors
    report(HEAD_NOTE)
    return {**tensors, HEAD: tensors[parameters(model)[0].name]}


def write_model(
    target: Path,
    format: CheckpointFormat,
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    beside: Mapping[str, bytes],
) -> None:
    """Write canonical tensors, and small files `beside`, in a format. Raises EnvironmentFault."""
    if format == "huggingface":
        write_hugging_face(target, tensors, model, beside)
        return
    named = to_mindformers(tensors, model)
    if format == "ckpt":
        write_ckpt(target, named)
    else:
        write_safetensors(target, named, {"format": "ms"})
    write_beside(target, beside)


def write_hugging_face(
    target: Path, tensors: Mapping[str, LazyTensor], model: Decoder, beside: Mapping[str, bytes]
) -> None:
    """Write canonical tensors, and small files `beside`, as a folder that transformers loads.
    Raises EnvironmentFault."""
    with replaced_folder(target, {INDEX, MANIFEST, *COPIED_FILES}) as temporary:
        theirs = to_hugging_face(tensors, model)
        write_safetensors(temporary / "model.safetensors", theirs, {"format": "pt"})
        write_files(temporary, beside)


def narrow(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Tensors in the 16-bit type that the most values have, where no bit of theirs is lost: GGUF
    files have vectors in F32, whatever the model was published in."""
    sizes: Counter[DType] = Counter()
    for tensor in tensors.values():
        if tensor.dtype != "F32":
            sizes[tensor.dtype] += math.prod(tensor.shape)
    if not sizes:
        return dict(tensors)
    ((dtype, _),) = sizes.most_common(1)

    def fits(tensor: LazyTensor) -> bool:
        if tensor.dtype != "F32" or tensor.block_type:
            return False
        values = tensor.float32()
        with np.errstate(over="ignore"):
            return np.array_equal(widened(narrowed(values, dtype)), values)

    return {n: cast(n, one, dtype) if fits(one) else one for n, one in tensors.items()}


def config_file(config: Decoder) -> dict[str, bytes]:
    """The config.json of the model, by name; empty for a family that transformers lacks."""
    if architecture_of(config).write is None:
        return {}
    return {"config.json": (json.dumps(hf_from_model_config(config), indent=2) + "\n").encode()}


def copied_files(source: Path, without: Collection[str] = ()) -> dict[str, bytes]:
    """Config and tokenizer beside a checkpoint by file name, but for those of `without`."""
    folder = config_folder(source)
    found = (folder / name for name in COPIED_FILES if name not in without)
    return {file.name: file.read_bytes() for file in found if file.is_file()}


def write_beside(target: Path, files: Mapping[str, bytes]) -> None:
    """Write config and tokenizer of the weights file `target` to TARGET.files. Raises
    EnvironmentFault."""
    with replaced_folder(files_folder(target), {*COPIED_FILES}) as temporary:
        write_files(temporary, files)


def files_folder(target: Path) -> Path:
    """The folder for config and tokenizer of the weights file `target`."""
    return target.with_name(target.name + FILES)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files (content by name) into `folder`. Raises EnvironmentFault."""
    for name, content in files.items():
        with atomic_write(folder / name, len(content)) as file:
            file.write(content)


def check_folder(target: Path, overwrite: bool) -> None:
    """Raise ConfigError where `target` is a file, or, without `overwrite`, a non-empty folder."""
    if target.is_file():
        raise ConfigError(f"{target}: a file, expected a folder to write to")
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target}: exists already", "choose another name, or overwrite=true")


def check_replaced(target: Path, what: str, *, ours: bool) -> None:
    """Raise ConfigError where overwrite=true would replace a file, or a folder that is not `ours`:
    whoever gave the name of the folder above loses nothing."""
    check_folder(target, overwrite=True)
    if not ours and target.is_dir() and any(target.iterdir()):
        raise ConfigError(
            f"{target}: not {what}, so overwrite=true does not replace it", "choose another name"
        )


def check_not_source(key: str, target: Path, source: Path | None) -> None:
    """Raise ConfigError where the folder `target`, which is replaced, holds the `source`."""
    if source is not None and source.resolve().is_relative_to(target.resolve()):
        where = "is" if source.resolve() == target.resolve() else "holds"
        raise ConfigError(f"{key}: {target} {where} the source", "choose another folder")


def check_target(target: Path, format: CheckpointFormat, overwrite: bool) -> None:
    """Raise ConfigError where a checkpoint of this format cannot be written there."""
    if format not in get_args(CheckpointFormat):
        raise ConfigError(
            f"format is {format!r}, expected one of {', '.join(get_args(CheckpointFormat))}"
        )
    if format == "huggingface":
        check_folder(target, overwrite)
        return
    if target.suffix != f".{format}" or target.is_dir():
        raise ConfigError(f"{target}: expected the name of a .{format} file to write")
    check_free(target, overwrite)
    check_free(files_folder(target), overwrite)


def check_free(target: Path, overwrite: bool) -> None:
    """Raise ConfigError where `target` exists, without `overwrite`."""
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists already", "choose another name, or overwrite=true")


def check_gguf(target: Path, overwrite: bool) -> None:
    """Raise ConfigError where `target` is no name of a GGUF file, or cannot be written as one."""
    if target.suffix != ".gguf" or target.is_dir():
        raise ConfigError(f"{target}: expected the name of a .gguf file to write")
    check_free(target, overwrite)


def with_progress(
    tensors: Mapping[str, LazyTensor], report: Callable[[str], None]
) -> dict[str, LazyTensor]:
    """The tensors; reading them reports every tenth of their values."""
    total = sum(math.prod(tensor.shape) for tensor in tensors.values())
    done, reported = 0, 0

    def count(array: NDArray[Any]) -> None:
        nonlocal done, reported
        done += array.size
        tenths = 10 * done // max(total, 1)
        if tenths > reported:
            reported = tenths
            report(f"converted {10 * tenths} % of {len(tensors)} tensors")

    return {name: watched(tensor, count) for name, tensor in tensors.items()}


@contextlib.contextmanager
def replaced_folder(target: Path, ours: Set[str]) -> Iterator[Path]:
    """A temporary folder, whose files replace those of `target` once all are written.

    Files of `ours` that `target` had and that are not written again are removed.
    """
    make_folder(target.parent)
    try:
        with temporary_folder(target.name, target.parent) as folder:
            temporary = folder / target.name
            temporary.mkdir()
            yield temporary
            if target.exists():
                written = sorted(temporary.iterdir())
                for file in written:
                    file.replace(target / file.name)
                # Leftover files of another model would be read together with this one.
                for stale in ours - {file.name for file in written}:
                    (target / stale).unlink(missing_ok=True)
            else:
                temporary.rename(target)
    except OSError as error:
        raise EnvironmentFault(
            f"{target}: cannot be written: {error.strerror or error}", "choose a writable folder"
        ) from error
    sync_folder(target.parent)
