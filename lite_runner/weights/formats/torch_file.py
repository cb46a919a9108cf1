"""PyTorch checkpoints (pytorch_model.bin): lazy views of tensors; no code in them is executed.

A file is a zip archive with ROOT/data.pkl, a pickle of tensors as strided views of storages, and
ROOT/data/KEY, the uncompressed bytes of each storage; or, before release 1.6, five pickles followed
by the storages. The pickles are interpreted by torch_pickle.py.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.weights.formats.safetensors_file import ITEM_BYTES, NUMPY_TYPES, view_tensor
from lite_runner.weights.formats.torch_pickle import NotTensors, Strided, interpret
from lite_runner.weights.memory_map import drop_pages, first_bytes, map_file
from lite_runner.weights.tensor import DType, Index, LazyTensor

MAX_READ = 64 * 2**20  # bytes of a pickle, of a directory of an archive
MAX_LINE = 4096  # bytes of a name in a pickle
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_LEGACY_MAGIC, _LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
_LOCAL_HEADER = 30  # bytes before the name of a member


def looks_like_torch(path: Path) -> bool:
    """Whether the file starts as a zip archive or a pickle."""
    start = first_bytes(path, 4)
    return start == _ZIP or start[:1] == _PICKLE


def open_torch(
    path: Path, ignore: Callable[[str], bool] = lambda name: False
) -> dict[str, LazyTensor]:
    """Every tensor of a dictionary of tensors that torch.save wrote, as lazy views.

    Tensors whose name `ignore` accepts are left out; the others must be F32, F16 or BF16. Raises
    ArtifactError if the file is damaged, or holds anything but tensors.
    """
    try:
        if first_bytes(path, 4) == _ZIP:
            found, storages = _read_zip(path)
        else:
            found, storages = _read_legacy(path)
    except (NotTensors, zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise refused(path, str(error)) from error
    if not isinstance(found, dict) or not found:
        raise refused(path, f"it holds a {type(found).__name__}, expected a dictionary of tensors")
    tensors = {}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Strided):
            kind = type(value).__name__
            raise refused(path, f"{str(name)[:80]!r} is a {kind}, expected a name and a tensor")
        if ignore(name):
            continue
        dtype = value.storage.dtype
        if dtype not in NUMPY_TYPES:
            raise ArtifactError(
                f"{path}: tensor {name} is {dtype}, expected one of {', '.join(NUMPY_TYPES)}",
                "convert the checkpoint to float32, float16 or bfloat16",
            )
        tensors[name] = _lazy(value, dtype, _stored(path, name, value, storages))
    return tensors


def refused(path: Path, reason: str) -> ArtifactError:
    """The error for a pickle that is refused."""
    return ArtifactError(
        f"{path}: a pickle, which can run any code when it is loaded: only plain tensors are taken "
        f"from one, and {reason}; nothing of it was run",
        "take the model's .safetensors files, or make them where you trust the file: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
    )


class _Bounded(io.BufferedReader):
    """A file with a limit on the bytes read, which no valid pickle or zip directory exceeds."""

    left = MAX_READ

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self.left + 1 if size is None or size < 0 else min(size, self.left + 1)
        data = super().read(wanted)
        self.left -= len(data)
        if self.left < 0:
            raise NotTensors(f"its pickle or directory has more than {MAX_READ:,} bytes")
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        self.left -= MAX_LINE
        return super().readline(MAX_LINE) if self.left > 0 else b""


def _read_zip(path: Path) -> tuple[Any, dict[str, NDArray[np.uint8]]]:
    """What data.pkl describes, and the bytes of each storage by its key."""
    members = _members(path)
    roots = [name.removesuffix("/data.pkl") for name in members if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise NotTensors(f"the archive holds {len(roots)} files data.pkl, expected one")
    order = members.get(f"{roots[0]}/byteorder")
    if order is not None and order.tobytes() != b"little":
        raise NotTensors("its numbers are not little-endian")
    pickled = members[f"{roots[0]}/data.pkl"]
    if pickled.size > MAX_READ:
        raise NotTensors(f"its pickle has {pickled.size:,} bytes")
    start = f"{roots[0]}/data/"
    storages = {
        name.removeprefix(start): data for name, data in members.items() if name.startswith(start)
    }
    return interpret(io.BytesIO(pickled.tobytes())), storages


def _members(path: Path) -> dict[str, NDArray[np.uint8]]:
    """The members of the archive by name, as views of the file, none of which overlap."""
    data = map_file(path)
    with _Bounded(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
        infos, end = archive.infolist(), archive.start_dir
    found: dict[str, NDArray[np.uint8]] = {}
    last = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        name, offset = info.filename, info.header_offset
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise NotTensors(f"{name[:80]!r} is compressed or encrypted")
        header = data[max(offset, 0) : offset + _LOCAL_HEADER].tobytes()
        if offset < last or len(header) < _LOCAL_HEADER or not header.startswith(_ZIP):
            raise NotTensors(f"{name[:80]!r} overlaps another member, or has no header")
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        start = offset + _LOCAL_HEADER + sum(lengths)
        last = start + info.file_size
        if info.compress_size != info.file_size or last > end or name in found:
            raise NotTensors(f"{name[:80]!r} reaches beyond the archive, or is there twice")
        found[name] = data[start:last]
    return found


def _read_legacy(path: Path) -> tuple[Any, dict[str, NDArray[np.uint8]]]:
    """As `_read_zip`, of a file from before release 1.6."""
    data = map_file(path)
    with _Bounded(io.FileIO(path)) as file:
        if interpret(file) != _LEGACY_MAGIC or interpret(file) != _LEGACY_VERSION:
            raise NotTensors("it is none of PyTorch's")
        system = interpret(file)
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise NotTensors("its numbers are not little-endian")
        found, keys, position = interpret(file), interpret(file), file.tell()
    values = found.values() if isinstance(found, dict) else ()
    needed = {one.storage.key: one.storage for one in values if isinstance(one, Strided)}
    if not isinstance(keys, list) or {key for key in keys if isinstance(key, str)} != set(needed):
        raise NotTensors("its storages are not those of its tensors")
    storages = {}
    for key in keys:  # each behind the number of its values
        size = needed[key].numel * ITEM_BYTES[needed[key].dtype]
        count = int.from_bytes(data[position : position + 8].tobytes(), "little")
        storages[key] = data[position + 8 : position + 8 + size]
        if count != needed[key].numel or storages[key].size != size:
            raise NotTensors(f"its storage {key[:40]!r} is cut off, or of another size")
        position += 8 + size
    return found, storages


def _stored(
    path: Path, name: str, tensor: Strided, storages: Mapping[str, NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """The bytes of a tensor's storage."""
    stored = storages.get(tensor.storage.key)
    needed = tensor.storage.numel * ITEM_BYTES[tensor.storage.dtype]
    if stored is None or stored.size != needed:
        held = "no" if stored is None else f"{stored.size:,}"
        raise ArtifactError(
            f"{path}: tensor {name} lies in a storage of {needed:,} bytes, the file holds {held} "
            "bytes of it",
            "the file is damaged: fetch or write it again",
        )
    return stored


def _lazy(tensor: Strided, dtype: DType, stored: NDArray[np.uint8]) -> LazyTensor:
    """The tensor as a view of its storage; a non-contiguous one is copied when read."""
    shape, item, count = tensor.shape, ITEM_BYTES[dtype], math.prod(tensor.shape)
    start = tensor.offset * item
    if tensor.strides == _contiguous(shape) or not count:
        return view_tensor(stored[start : start + count * item], dtype, shape)

    def part(index: Index) -> NDArray[Any]:
        values: NDArray[Any] = stored.view(NUMPY_TYPES[dtype])[tensor.offset :]
        strides = [item * stride for stride in tensor.strides]
        whole = np.lib.stride_tricks.as_strided(values, shape, strides, writeable=False)
        copied = np.array(whole[index] if index else whole, order="C")
        drop_pages(stored)
        return copied

    return LazyTensor(shape, dtype, lambda: part(()), part)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
