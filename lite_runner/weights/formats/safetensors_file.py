"""The safetensors format: a strict reader of zero-copy views, and a streaming writer.

Layout: 8 bytes header length (little endian), a JSON header, the tensors without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.files import atomic_write, parse_json
from lite_runner.weights import CHUNK, DType, Index, LazyTensor, drop_pages, first_bytes, map_file

MAX_DIMENSION = 2**48
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
NUMPY_TYPES: dict[DType, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of any type of the format, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class Entry:
    """A tensor to write; `chunks` yields its bytes when it is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[NDArray[Any]]]


def read_once(
    layout: Mapping[str, tuple[str, tuple[int, ...]]],
    arrays: Callable[[], Iterable[tuple[str, NDArray[Any]]]],
) -> Iterator[Entry]:
    """The tensors that a matrix or layer is stored as, by type and shape. Their `arrays` are
    computed once, for the first of them."""
    unwritten: dict[str, NDArray[Any]] = {}

    def chunks(name: str) -> Iterator[NDArray[Any]]:
        if not unwritten:
            unwritten.update(arrays())
        yield unwritten.pop(name)

    for name, (dtype, shape) in layout.items():
        yield Entry(name, dtype, shape, partial(chunks, name))


def counted(entries: Iterable[Entry], done: Callable[[], None]) -> list[Entry]:
    """The entries of a matrix or layer; `done` is called once the last of them is written."""
    *before, last = entries

    def chunks() -> Iterator[NDArray[Any]]:
        yield from last.chunks()
        done()

    return [*before, replace(last, chunks=chunks)]


def looks_like_safetensors(path: Path) -> bool:
    """True if the first bytes are a header length and the start of a JSON object."""
    start = first_bytes(path, 9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < 2**40


def open_safetensors(
    path: Path,
    ignore: Callable[[str], bool] = lambda name: False,
    others: dict[str, StoredTensor] | None = None,
) -> dict[str, LazyTensor]:
    """Every tensor of the file as a read-only view of its bytes, in the file's order.

    Tensors whose name `ignore` accepts are left out. Those that are not F32, F16 or BF16 are added
    to `others`; without it there must be none. Raises ArtifactError for any deviation from the
    format.
    """
    from lite_runner.weights.formats.packed_layouts import tensor_type_error

    tensors: dict[str, LazyTensor] = {}
    every = stored_tensors(path)
    for name, stored in every.items():
        if ignore(name):
            continue
        if stored.dtype not in NUMPY_TYPES:
            if others is not None:
                others[name] = stored
                continue
            raise tensor_type_error(path, name, stored.dtype, every)
        tensors[name] = view_tensor(stored.data, stored.dtype, stored.shape)
    return tensors


def stored_tensors(path: Path, *, private: bool = False) -> dict[str, StoredTensor]:
    """Every tensor of the file, of whatever type; its bytes are a read-only view, or a `private`
    one: what is written to it stays in this process.

    Raises ArtifactError for any deviation from the format.
    """
    data = map_file(path, private=private)
    start, header = _read_header(path, data)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            _check_metadata(path, entry)
            continue
        dtype, shape, begin, end = _check_entry(path, name, entry, data.size - start)
        spans.append((begin, end, name))
        tensors[name] = StoredTensor(dtype, shape, data[start + begin : start + end])
    _check_spans(path, spans, data.size - start)
    return tensors


def metadata_of(path: Path) -> dict[str, str]:
    """The header's __metadata__. Raises ArtifactError."""
    _, header = _read_header(path, map_file(path))
    found: dict[str, str] = header.get("__metadata__", {})
    _check_metadata(path, found)
    return found


def view_tensor(data: NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]) -> LazyTensor:
    """The bytes `data` as a tensor; copied when read only if they are not aligned."""

    def part(index: Index) -> NDArray[Any]:
        array: NDArray[Any] = data.view(NUMPY_TYPES[dtype]).reshape(shape)
        array = array[index] if index else array
        if array.flags.aligned and array.flags.c_contiguous:
            return array
        copied = array.copy()
        drop_pages(array)
        return copied

    return LazyTensor(shape, dtype, lambda: part(()), part)


def _read_header(path: Path, data: NDArray[np.uint8]) -> tuple[int, dict[str, Any]]:
    """Offset of the tensors in the file, and the JSON header."""
    if data.size < 8:
        raise _broken(path, f"the file has {data.size} bytes, too few for a header", truncated=True)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > MAX_HEADER:
        raise _broken(path, f"the header claims {length:,} bytes, at most {MAX_HEADER:,} allowed")
    if length > data.size - 8:
        raise _broken(
            path,
            f"the header claims {length:,} bytes, {data.size - 8:,} follow its length",
            truncated=True,
        )
    try:
        header = parse_json(data[8 : 8 + length].tobytes())
    except ValueError as error:
        raise _broken(path, f"the header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, f"the header is a JSON {type(header).__name__}, expected an object")
    return 8 + length, header


def _check_metadata(path: Path, entry: object) -> None:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise _broken(path, "__metadata__ must map texts to texts")


def _check_entry(
    path: Path, name: str, entry: object, available: int
) -> tuple[Any, tuple[int, ...], int, int]:
    """The validated type, shape, first and last byte (exclusive) of one tensor."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(path, f"tensor {name!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _broken(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _natural_numbers(shape) or not _natural_numbers(offsets) or len(offsets) != 2:
        raise _broken(
            path,
            f"tensor {name!r} has shape {_short(shape)} and data_offsets {_short(offsets)}, "
            "expected lists of non-negative integers, two of them for the offsets",
        )
    if max(shape, default=0) >= MAX_DIMENSION:
        raise _broken(path, f"tensor {name!r} has the impossible shape {_short(shape)}")
    begin, end = offsets
    if not begin <= end <= available:
        raise _broken(
            path,
            f"tensor {name!r} lies at bytes {_short(begin)}..{_short(end)}, "
            f"the file holds {available:,} of them",
            truncated=end > available,
        )
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if needed != end - begin:
        raise _broken(
            path,
            f"tensor {name!r} {dtype} {_short(shape)} needs {needed:,} bytes, "
            f"its offsets give {end - begin:,}",
        )
    return dtype, tuple(shape), begin, end


def _natural_numbers(value: object) -> bool:
    # bool is an int to Python, not to the format; 32 dimensions is NumPy's limit.
    return (
        isinstance(value, list)
        and len(value) <= 32
        and all(type(item) is int and item >= 0 for item in value)
    )


def _check_spans(path: Path, spans: list[tuple[int, int, str]], available: int) -> None:
    """The tensors must cover the file without gap or overlap."""
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            kind = "overlaps the one before" if begin < position else "leaves a gap before it"
            raise _broken(path, f"tensor {name!r} at byte {begin}, expected {position}: {kind}")
        position = end
    if position != available:
        raise _broken(path, f"{available - position:,} bytes follow the last tensor")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _broken(path: Path, what: str, truncated: bool = False) -> ArtifactError:
    hint = "the download or copy was cut short: fetch the file again" if truncated else ""
    return ArtifactError(
        f"{path}: not a valid safetensors file: {what}", hint or "fetch or write the file again"
    )


def write_safetensors(
    path: Path, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]
) -> None:
    """Write `tensors` one by one; memory is bounded by the largest.

    The file is written atomically. Raises EnvironmentFault: disk too small, or read-only.
    """
    # Largest item size first keeps every tensor aligned, as the format's own library does.
    names = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    entries = [
        Entry(name, one.dtype, one.shape, partial(one.chunks, CHUNK))
        for name, one in ((name, tensors[name]) for name in names)
    ]
    write_entries(path, entries, metadata)


def write_entries(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
    """Write tensors in their order, each read only once the previous one is written.

    The file is written atomically. Raises EnvironmentFault: disk too small, or read-only.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for entry in entries:
        end = position + math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path, size=8 + len(text) + position) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            for chunk in entry.chunks():
                file.write(np.ascontiguousarray(chunk).data)
                drop_pages(chunk)
