"""GGUF files, read strictly and fast: metadata, and tensors as views of their bytes.

Arrays of the metadata are walked over and decoded only on request: a vocabulary has 50,000 and more
strings. The `gguf` library supplies the quantization types and their arithmetic. Its own reader is
not used: it takes seconds over a real vocabulary and trusts the counts in the file.
Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.quantization import Scheme
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights import DType, LazyBlocks, LazyIntegers, LazyTensor, first_bytes
from lite_runner.weights.formats.safetensors_file import view_tensor

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 65536
_MAX_DIMENSION = 2**48
_TENSOR_BYTES = 32  # of the shortest entry of the table
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")  # stands before every string
# Of each byte: their sum, of 32 bits, tells strings apart but for the order of their bytes.
_CODES = (np.arange(1, 257, dtype=np.uint32) ** 3) * np.uint32(2654435761)
_USUAL_STRING = 32  # bytes with its length, at most, on average
# GGML's number of each type that is read: its name, the values of a block and its bytes, as the
# library has them, whose import takes 40 ms.
TYPES = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 8: ("Q8_0", 32, 34)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144)},
    **{13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210)},
    **{20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17)},
    **{16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 22: ("IQ2_S", 256, 82)},
    **{18: ("IQ3_XXS", 256, 98), 21: ("IQ3_S", 256, 110)},
    **{19: ("IQ1_S", 256, 50), 29: ("IQ1_M", 256, 56)},
    **{34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 40: ("NVFP4", 64, 36)},
}
FLOATS: dict[str, DType] = {dtype: dtype for dtype in get_args(DType)}
QUANTIZED_TYPES = tuple(name for name, _, _ in TYPES.values() if name not in FLOATS)


# As llama.cpp names the files of a split checkpoint.
PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>(?!00000)\d{5})\.gguf")


@dataclass(frozen=True, repr=False)
class Array:
    """`count` strings or numbers of one key, not yet decoded from the file."""

    path: Path
    key: str
    kind: int
    count: int
    encoded: memoryview

    def __repr__(self) -> str:
        return f"<array of {self.count:,} values>"

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, place: int) -> Any:
        """A single value; of strings no other is decoded."""
        if self.kind != _STRING:
            return list(self)[place]
        place = range(self.count)[place]
        start, end = self._starts[place : place + 2].tolist()
        with self._decoding():
            return bytes(self.encoded[start : end - 8]).decode()

    def in_memory(self) -> Array:
        """A copy, which the file may change under."""
        return replace(self, encoded=memoryview(bytes(self.encoded)))

    def values(self) -> list[Any]:
        """Raises ArtifactError for a string that is not UTF-8."""
        if self.kind != _STRING:
            return [*struct.unpack(f"<{self.count}{_NUMBERS[self.kind]}", self.encoded)]
        kept, starts = np.ones(len(self.encoded), bool), self._starts
        for place in range(2, 9):  # of each length one byte is left, to split at
            kept[starts[:-1] - place] = False
        joined = np.frombuffer(self.encoded, np.uint8)[kept]
        with self._decoding():
            strings: list[str] = joined.tobytes().decode().split("\0")[1:]
            if len(strings) == self.count:  # none holds a NUL
                return strings
            data, pairs = bytes(self.encoded), itertools.pairwise(starts.tolist())
            return [data[start : end - 8].decode() for start, end in pairs]

    def places_like(self, wanted: Iterable[str], spaces: int = 0) -> list[int]:
        """The places of strings that, but for some `spaces`, may be among the `wanted`: of all that
        are, and of a few more. No string is decoded."""
        # The zero behind them is of an empty string at the end.
        codes = np.append(_CODES[np.frombuffer(self.encoded, np.uint8)], np.uint32(0))
        bounds = np.stack([self._starts[:-1], self._starts[1:] - 8], 1).ravel()[:-1]
        sums = (
            np.add.reduceat(codes, bounds, dtype=np.uint32)[::2]
            - np.uint32(spaces) * _CODES[ord(" ")]
        )
        likely, code_of = np.zeros(1 << 16, bool), _CODES.tolist()
        for one in wanted:
            likely[sum(map(code_of.__getitem__, one.encode())) >> 16 & 0xFFFF] = True
        return list(np.flatnonzero(likely[sums >> 16]).tolist())

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return _string_starts(self.encoded, self.count)

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:
            raise _format_error(
                self.path, f"key {self.key!r}: a string that is not UTF-8"
            ) from error


def _string_starts(data: memoryview, count: int) -> NDArray[np.int64]:
    """Offsets of the first `count` strings, each behind its length, and of one more.

    Lengths below 256 are found by their zeros, in a fifth of the time of walking over the strings.
    Raises struct.error or OverflowError where a string begins beyond the end of `data`.
    """
    window = np.frombuffer(data, np.uint8, min(len(data), _USUAL_STRING * count))
    zeros = window == 0
    for step in (1, 2, 3):  # runs of 2, 4 and then 7 zeros
        zeros = zeros[step:] & zeros[:-step]
    lengths_at = np.flatnonzero(zeros[1:])[:count]
    starts = np.append(0, lengths_at + window[lengths_at] + 8) + 8
    if len(lengths_at) == count and np.array_equal(starts[:-1], lengths_at + 8):
        return starts
    length_at, walked = _LENGTH.unpack_from, [8]
    for _ in range(count):
        walked.append(walked[-1] + 8 + length_at(data, walked[-1] - 8)[0])
    return np.array(walked)


@dataclass(frozen=True)
class TensorEntry:
    """One line of the table. `shape` is NumPy's: the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: int  # GGML's number
    offset: int  # bytes, from the first aligned position after the header


@dataclass(frozen=True)
class GGUFHeader:
    """The header; `data` also holds the bytes of the tensors, unread."""

    path: Path
    data: mmap.mmap  # the whole file, read-only
    metadata: dict[str, Any]  # key -> number, bool, string or Array
    tensors: tuple[TensorEntry, ...]
    end: int  # bytes of the header

    def error(self, what: str) -> ArtifactError:
        """The error for a file that violates the format."""
        return _format_error(self.path, what)


# By path and state of the file. References are weak: the file stays mapped as long as somebody
# holds the header.
_held: WeakValueDictionary[tuple[Path, int, int, int], GGUFHeader] = WeakValueDictionary()


def read_metadata(path: Path) -> dict[str, Any]:
    """All keys of `path`, as Python values; arrays are lists. Raises as `read_header` does."""
    return {
        key: value.values() if isinstance(value, Array) else value
        for key, value in read_header(path).metadata.items()
    }


def read_header(path: Path) -> GGUFHeader:
    """The header of `path`. One that is still held elsewhere is returned, not parsed again.

    Raises ArtifactError where the file is missing, is no GGUF of version 2 or 3, names a key or
    a tensor twice, or has a length that points past its end.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            key = (path, status.st_ino, status.st_size, status.st_mtime_ns)
            if (header := _held.get(key)) is not None:
                return header
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise ArtifactError(f"{path}: not a GGUF file: it is empty", "fetch it again") from error
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from error
    header = _held[key] = _Reader(path, data).header()
    return header


class _Reader:
    """Reads sequentially; every step is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = 0
        self._place = "header"

    def header(self) -> GGUFHeader:
        start = self._data[:4]
        if start != MAGIC:
            raise ArtifactError(
                f"{self._path}: not a GGUF file: it starts with {start!r}, not {MAGIC!r}",
                "fetch the file again, and check that it is not an error page or of another format",
            )
        self._position = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ArtifactError(
                f"{self._path}: GGUF version {version:#x}, expected 2 or 3, little endian",
                "take a newer file of this model",
            )
        tensor_count, key_count = self._number("Q"), self._number("Q")
        metadata = self._metadata(key_count)
        tensors = self._tensors(tensor_count)
        return GGUFHeader(self._path, self._data, metadata, tensors, self._position)

    def _metadata(self, count: int) -> dict[str, Any]:
        if count > _MAX_KEYS:
            raise self._broken(f"{count:,} keys, at most {_MAX_KEYS:,} are expected")
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            self._place = f"key {key!r}"
            if key in values:
                raise self._broken("the key occurs twice")
            values[key] = self._value(key)
            self._place = f"after key {key!r}"
        return values

    def _value(self, key: str) -> Any:
        kind = self._number("I")
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._layout(kind))
        kind, count = self._number("I"), self._number("Q")
        start = self._position
        if kind == _STRING:
            self._skip_strings(count)
        else:
            self._skip(count * struct.calcsize(self._layout(kind)))
        encoded = memoryview(self._data)[start : self._position]
        return Array(self._path, key, kind, count, encoded)

    def _tensors(self, count: int) -> tuple[TensorEntry, ...]:
        self._place = "table of tensors"
        left = len(self._data) - self._position
        if count * _TENSOR_BYTES > left:
            raise self._broken(f"{count:,} tensors announced, {left:,} bytes left")
        entries: dict[str, TensorEntry] = {}
        for _ in range(count):
            entry = self._tensor()
            if entry.name in entries:
                raise self._broken("the tensor occurs twice")
            entries[entry.name] = entry
            self._place = f"after tensor {entry.name!r}"
        return tuple(entries.values())

    def _tensor(self) -> TensorEntry:
        name = self._string()
        self._place = f"tensor {name!r}"
        dimensions = self._number("I")
        if not 1 <= dimensions <= 4:
            raise self._broken(f"{dimensions} dimensions, expected 1 to 4")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        if max(shape) >= _MAX_DIMENSION:
            raise self._broken(f"the impossible shape {list(shape)}")
        return TensorEntry(name, shape, self._number("I"), self._number("Q"))

    def _string(self) -> str:
        length = self._number("Q")
        left = len(self._data) - self._position
        if length > left:
            raise self._broken(f"a string of {length:,} bytes, {left:,} bytes left")
        start = self._skip(length)
        try:
            return self._data[start : self._position].decode()
        except UnicodeDecodeError as error:
            raise self._broken("a string that is not UTF-8") from error

    def _skip_strings(self, count: int) -> None:
        data, size, position = self._data, len(self._data), self._position
        if count * 8 > size - position:
            raise self._broken(f"{count:,} strings announced, {size - position:,} bytes left")
        try:
            end = position + int(_string_starts(memoryview(data)[position:], count)[-1]) - 8
        except (struct.error, OverflowError):  # the last length pointed far away
            end = size + 1
        if end > size:
            raise self._broken("its strings go on past the end of the file")
        self._position = end

    def _number(self, layout: str) -> Any:
        start = self._skip(struct.calcsize(layout))
        return struct.unpack_from(f"<{layout}", self._data, start)[0]

    def _layout(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._broken(f"value type {kind} is unknown")
        return _NUMBERS[kind]

    def _skip(self, length: int) -> int:
        """Advance by `length` bytes; returns the position before."""
        start = self._position
        if length > len(self._data) - start:
            raise self._broken(f"{length:,} bytes announced, {len(self._data) - start:,} left")
        self._position = start + length
        return start

    def _broken(self, what: str) -> ArtifactError:
        return _format_error(self._path, f"{self._place}: {what} (near byte {self._position:,})")


def _format_error(path: Path, what: str) -> ArtifactError:
    return ArtifactError(
        f"{path}: not a valid GGUF file: {what}", "the file is cut off or damaged: fetch it again"
    )


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file. `shape` is NumPy's: the last dimension is contiguous."""

    shape: tuple[int, ...]
    type_name: str
    data: NDArray[np.uint8]

    def lazy(self, start: int = 0, stop: int | None = None) -> LazyTensor:
        """The tensor, or its rows `start` to `stop`; quantized values become F32.

        A matrix has its blocks as well, and where these are integers with a scale, the integers.
        """
        from lite_runner.weights.formats.gguf_blocks import (
            INDEXED,
            SCHEMES,
            BlockMatrix,
            dequantize,
            indices,
            integers_of,
            mxfp4,
        )

        count = self.shape[0] if stop is None else stop
        row_bytes = self.data.size // max(self.shape[0], 1)
        data = self.data[start * row_bytes : count * row_bytes]
        shape = (count - start, *self.shape[1:])
        dtype = FLOATS.get(self.type_name)
        if dtype is not None:
            return view_tensor(data, dtype, shape)
        scheme = SCHEMES.get(self.type_name)
        integers = blocks = None
        if len(shape) == 2 and self.type_name == "MXFP4":
            integers = LazyIntegers(Scheme(4, 32, 2), partial(mxfp4, data, *shape), True)
        elif len(shape) == 2 and self.type_name in INDEXED:
            _, group, bits = INDEXED[self.type_name]
            read = partial(indices, data, self.type_name, *shape)
            integers = LazyIntegers(Scheme(4, group, 4), read, True, file_bits=bits)
        elif len(shape) == 2:
            matrix = BlockMatrix(self.type_name, data.reshape(shape[0], -1), shape[1])
            blocks = LazyBlocks(self.type_name, data.nbytes, lambda: matrix)
        if scheme is not None and len(shape) == 2:
            rows, columns = shape
            read = partial(integers_of, data, self.type_name, rows, columns)
            integers = LazyIntegers(scheme, read, True)
        return LazyTensor(
            shape,
            "F32",
            lambda: dequantize(data, self.type_name).reshape(shape),
            integers=integers,
            block_type=self.type_name,
            blocks=blocks,
        )


@dataclass(frozen=True)
class GGUFFile:
    """Header and tensors of one file; of a split checkpoint the header of its first file, and the
    tensors of all."""

    header: GGUFHeader
    tensors: dict[str, GGUFTensor]
    others: tuple[GGUFHeader, ...] = ()  # of the other parts, kept mapped like the first

    @property
    def path(self) -> Path:
        return self.header.path

    @property
    def metadata(self) -> dict[str, Any]:
        return self.header.metadata

    @property
    def quantized(self) -> bool:
        """True if any of the tensors is in blocks."""
        return any(one.type_name not in FLOATS for one in self.tensors.values())


def looks_like_gguf(path: Path) -> bool:
    """True if the file starts with the magic number."""
    return first_bytes(path, 4) == MAGIC


def parts_of(path: Path) -> list[Path]:
    """The files of the split checkpoint of `path`, in order, present or not; of another
    file it alone."""
    part = PART.fullmatch(path.name)
    if part is None:
        return [path]
    count = part["count"]
    return [
        path.with_name(f"{part['name']}-{number:05}-of-{count}.gguf")
        for number in range(1, int(count) + 1)
    ]


def is_split(files: Collection[Path]) -> bool:
    """True if these are the files of one split checkpoint, or some of them."""
    return len({tuple(parts_of(file)) for file in files}) == 1


def open_gguf(path: Path) -> GGUFFile:
    """Parse the file, or all files of a split checkpoint of which `path` is any. Raises
    ArtifactError for whatever does not follow the format, and where a part is missing."""
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):  # 0 once its parts were merged
        return GGUFFile(header, _tensors(header))
    parts = parts_of(path)
    if len(parts) != count:
        raise ArtifactError(
            f"{path}: one of {count!r} parts of a checkpoint, and its name does not say which",
            "name the parts NAME-00001-of-00003.gguf and so on, as they were published",
        )
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ArtifactError(
            f"{path}: one of {count} parts of a checkpoint; there is no "
            + ", ".join(missing[:5])
            + (" ..." if missing[5:] else ""),
            "fetch all parts to the same folder",
        )
    headers = [read_header(part) for part in parts]
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(headers):
        place = part.metadata.get("split.no"), part.metadata.get("split.count")
        if place != (number, count):
            raise part.error(f"split.no and split.count are {place}, expected {(number, count)}")
        found = _tensors(part)
        if twice := tensors.keys() & found.keys():
            raise part.error(f"tensor {min(twice)!r} is in a part before it, too")
        tensors |= found
    total = headers[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise headers[0].error(f"its parts hold {len(tensors)} tensors, expected {total!r}")
    return GGUFFile(headers[0], tensors, tuple(headers[1:]))


def _tensors(header: GGUFHeader) -> dict[str, GGUFTensor]:
    alignment = header.metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise header.error(f"general.alignment {alignment!r}, expected a power of two")
    start = _padded(header.end, alignment)
    data = np.frombuffer(header.data, np.uint8)
    tensors: dict[str, GGUFTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for entry in header.tensors:
        type_name, block, block_bytes = _stored_type(header, entry)
        begin = start + entry.offset
        end = begin + math.prod(entry.shape) // block * block_bytes
        if entry.offset % alignment or end > data.size:
            raise header.error(
                f"tensor {entry.name!r} lies at bytes {begin:,}..{end:,}, the file has "
                f"{data.size:,}"
                + (f" and aligns tensors to {alignment:,}" if entry.offset % alignment else "")
            )
        spans.append((begin, end, entry.name))
        tensors[entry.name] = GGUFTensor(entry.shape, type_name, data[begin:end])
    _check_spans(header, spans, start, alignment)
    return tensors


def _check_spans(
    header: GGUFHeader, spans: list[tuple[int, int, str]], start: int, alignment: int
) -> None:
    """The tensors must follow one another from `start` on, in any order of the table, with
    nothing but the padding of each between them; some writers leave out that of the last."""
    position = start
    for begin, end, name in sorted(spans):
        if begin != position:
            kind = "overlaps the one before" if begin < position else "leaves a gap before it"
            raise header.error(f"tensor {name!r} at byte {begin:,}, expected {position:,}: {kind}")
        position = _padded(end, alignment)
    if len(header.data) > position:
        raise header.error(f"{len(header.data) - position:,} bytes follow the last tensor")


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _stored_type(header: GGUFHeader, entry: TensorEntry) -> tuple[str, int, int]:
    """One of TYPES, with whole blocks in a row."""
    where = f"{header.path}: tensor {entry.name}"
    if entry.type not in TYPES:
        raise ArtifactError(
            f"{where} is of type {_unread_type(header, entry)}, expected one of "
            f"{', '.join((*FLOATS, *QUANTIZED_TYPES))}",
            "take a file of another quantization, such as Q4_K_M or Q8_0",
        )
    name, block, _ = TYPES[entry.type]
    if entry.shape[-1] % block:
        raise ArtifactError(
            f"{where} {list(entry.shape)} has rows of {entry.shape[-1]} values, expected a "
            f"multiple of {block} for {name}"
        )
    return TYPES[entry.type]


def _unread_type(header: GGUFHeader, entry: TensorEntry) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        name: str = GGMLQuantizationType(entry.type).name
    except ValueError as error:
        raise header.error(f"tensor {entry.name!r} has the unknown type {entry.type}") from error
    return name
