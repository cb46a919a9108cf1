"""MindSpore's .ckpt format: a lazy reader and a streaming writer that need no mindspore.

A file is one protobuf message `Checkpoint { repeated Value value = 1 }` with
`Value { string tag = 1; TensorProto tensor = 2 }` and
`TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }`.
Large tensors are split into consecutive values with the same tag; a file may end with `crc_num`
and the CRC32 of all bytes before it, as 10 bytes, big endian.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.files import atomic_write
from lite_runner.system.protobuf import field, fields, opening, read_varint, varint
from lite_runner.weights import CHUNK, DType, Index, LazyTensor, drop_pages, first_bytes, map_file
from lite_runner.weights.formats.safetensors_file import (
    ITEM_BYTES,
    Entry,
    StoredTensor,
    view_tensor,
)

SLICE = 512 * 2**20  # bytes of a tensor in one value, as MindSpore splits them
MAX_TEXT = 4096  # bytes of a name
CRC_MARK = b"crc_num"
CRC_BYTES = 10
TYPES: dict[str, DType] = {"Float32": "F32", "Float16": "F16", "BFloat16": "BF16"}
# Of quantized matrices; Int4 has two numbers in each of the bytes that its shape counts.
_INTEGERS = {"Int8": "I8", "Int4": "I4", "Int32": "I32", "Int64": "I64", "UInt64": "U64"}
TYPE_NAMES = {dtype: name for name, dtype in (TYPES | _INTEGERS).items()}


def looks_like_ckpt(path: Path) -> bool:
    """True if the file starts with a protobuf field 1 of a known length."""
    return first_bytes(path, 1) == b"\x0a"


@dataclass
class _Entry:
    """One tensor: the byte spans of its consecutive values."""

    shape: tuple[int, ...]
    type_name: str
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def open_ckpt(path: Path, others: dict[str, StoredTensor] | None = None) -> dict[str, LazyTensor]:
    """Every floating-point tensor of the file; integers are added to `others`. Other values (step
    counters) are left out.

    Raises ArtifactError if the file does not parse, or its checksum does not match.
    """
    data = map_file(path)
    end = _checked_end(path, data)
    try:
        entries = _parse(data, end)
    except ValueError as error:
        raise ArtifactError(
            f"{path}: not a valid MindSpore checkpoint: {error}",
            "the file is damaged, encrypted or of another format: fetch or write it again",
        ) from error
    tensors = {}
    for name, entry in entries.items():
        dtype = TYPES.get(entry.type_name)
        whole = None if others is None else _INTEGERS.get(entry.type_name)
        if dtype is None and whole is None:
            continue
        held = sum(stop - start for start, stop in entry.spans)
        needed = math.prod(entry.shape) * ITEM_BYTES.get(dtype or whole or "", 1)
        if held != needed:
            raise ArtifactError(
                f"{path}: tensor {name} {list(entry.shape)} {dtype or whole} needs {needed:,} "
                f"bytes, the file holds {held:,}",
                "the file is damaged: fetch or write it again",
            )
        if dtype is not None:
            tensors[name] = _tensor(data, entry, dtype)
        elif others is not None and whole is not None:
            others[name] = StoredTensor(whole, entry.shape, _joined(data, entry.spans, 0, held))
    return tensors


def _tensor(data: NDArray[np.uint8], entry: _Entry, dtype: DType) -> LazyTensor:
    if len(entry.spans) == 1:
        start, stop = entry.spans[0]
        return view_tensor(data[start:stop], dtype, entry.shape)

    row_bytes = sum(stop - start for start, stop in entry.spans) // entry.shape[0]

    def part(index: Index) -> NDArray[Any]:
        first, end, _ = (index[0] if index else slice(None)).indices(entry.shape[0])
        rows = _joined(data, entry.spans, first * row_bytes, end * row_bytes)
        held = view_tensor(rows, dtype, (end - first, *entry.shape[1:]))
        return held.piece((slice(None), *index[1:]))

    return LazyTensor(entry.shape, dtype, lambda: part(()), part)


def _joined(
    data: NDArray[np.uint8], spans: list[tuple[int, int]], first: int, end: int
) -> NDArray[np.uint8]:
    found, position = [], 0
    for start, stop in spans:
        low, high = max(first - position, 0), min(end - position, stop - start)
        if low < high:
            found.append(data[start + low : start + high])
        position += stop - start
    return found[0] if len(found) == 1 else np.concatenate([*found, data[:0]])


def _checked_end(path: Path, data: NDArray[np.uint8]) -> int:
    """The end of the message; verifies the CRC of a file that has one."""
    end = data.size - len(CRC_MARK) - CRC_BYTES
    if end < 0 or data[end : end + len(CRC_MARK)].tobytes() != CRC_MARK:
        return int(data.size)
    stored = int.from_bytes(data[-CRC_BYTES:].tobytes(), "big")
    actual = zlib.crc32(data[:end].data)
    if actual != stored:
        raise ArtifactError(
            f"{path}: the checksum is {actual:#010x}, the file says {stored:#010x}",
            "the file is damaged: fetch or write it again",
        )
    return end


def _parse(data: NDArray[np.uint8], end: int) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    last = ""
    for number, _, start, stop in fields(data, 0, end):
        if number != 1:
            raise ValueError(f"field {number} at byte {start:,}, expected only field 1")
        name, entry = _parse_value(data, start, stop)
        if name not in entries:
            entries[name] = entry
        elif (
            name != last
            or (entry.shape, entry.type_name) != (entries[name].shape, entries[name].type_name)
            or not entry.shape  # no rows to cut it between
            or 0 in entry.shape
        ):
            raise ValueError(f"tensor {name!r} occurs twice, again at byte {start:,}")
        else:
            entries[name].spans += entry.spans
        last = name
    return entries


def _parse_value(data: NDArray[np.uint8], start: int, stop: int) -> tuple[str, _Entry]:
    name, entry = "", None
    for number, _, begin, end in fields(data, start, stop):
        if number == 1:
            name = _text(data, begin, end)
        elif number == 2:
            entry = _parse_tensor(data, begin, end)
        else:
            raise ValueError(f"field {number} of a value at byte {begin:,} is not a plain tensor")
    if not name or entry is None:
        raise ValueError(f"the value at byte {start:,} lacks a name or a tensor")
    return name, entry


def _parse_tensor(data: NDArray[np.uint8], start: int, stop: int) -> _Entry:
    dims: list[int] = []
    type_name, content = "", None
    for number, _, begin, end in fields(data, start, stop):
        if number == 1:  # repeated int64: one varint a field, or packed in one field
            while begin < end:
                size, begin = read_varint(data, begin, end)
                dims.append(size)
        elif number == 2:
            type_name = _text(data, begin, end)
        elif number == 3:
            content = (begin, end)
        if len(dims) > 32 or any(size >= 2**48 for size in dims):
            raise ValueError(f"the tensor at byte {start:,} has impossible dimensions")
    if not type_name or content is None:
        raise ValueError(f"the tensor at byte {start:,} lacks its type or content")
    # MindSpore writes [0] for a scalar.
    shape = () if dims == [0] and content[1] > content[0] else tuple(dims)
    return _Entry(shape, type_name, [content])


def _text(data: NDArray[np.uint8], start: int, stop: int) -> str:
    if stop - start > MAX_TEXT:
        raise ValueError(f"the name at byte {start:,} has {stop - start:,} bytes")
    try:
        return data[start:stop].tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the name at byte {start:,} is not UTF-8") from error


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor in a file."""
    return math.prod(shape) * (1 if dtype == "I4" else ITEM_BYTES[dtype])


def write_ckpt(
    path: Path, tensors: Mapping[str, LazyTensor], counters: Mapping[str, int] | None = None
) -> None:
    """Write `tensors` as a file that mindspore.load_checkpoint reads; one tensor in memory.
    `counters`: of a training, such as global_step.

    The file is written atomically. Raises EnvironmentFault: disk too small, or read-only.
    """
    entries = [
        Entry(name, one.dtype, one.shape, partial(one.chunks, CHUNK))
        for name, one in tensors.items()
    ]
    for name, count in (counters or {}).items():
        number = np.array([count], np.int32)
        entries.append(Entry(name, "I32", (1,), partial(iter, [number])))
    write_ckpt_entries(path, entries)


def write_ckpt_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Write tensors, integers too, each read only once the previous one is written.

    The file is written atomically. Raises EnvironmentFault: disk too small, or read-only.
    """
    sizes = [bytes_of(one.dtype, one.shape) for one in entries]
    with atomic_write(path, sum(sizes)) as file:
        for entry, nbytes in zip(entries, sizes, strict=True):
            if not nbytes:
                file.write(_value_header(entry, 0))
                continue
            written = 0
            for chunk in entry.chunks():
                content = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
                while content.size:
                    room = SLICE - written % SLICE
                    if room == SLICE:
                        file.write(_value_header(entry, min(SLICE, nbytes - written)))
                    file.write(content[:room].data)
                    written += min(room, content.size)
                    content = content[room:]
                drop_pages(chunk)


def _value_header(entry: Entry, content_size: int) -> bytes:
    """The bytes of a value before the content of its tensor."""
    described = b"".join(b"\x08" + varint(size) for size in entry.shape or (0,))
    described += field(2, TYPE_NAMES[entry.dtype].encode()) + opening(3, content_size)
    tagged = field(1, entry.name.encode())
    tensor_size = len(described) + content_size
    tensor_opening = opening(2, tensor_size)
    value_size = len(tagged) + len(tensor_opening) + tensor_size
    return opening(1, value_size) + tagged + tensor_opening + described
