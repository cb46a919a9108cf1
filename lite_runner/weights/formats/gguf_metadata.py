"""The header of a GGUF file, read strictly and fast: its metadata and its table of tensors.

Arrays are walked over and decoded only on request: a vocabulary has 50,000 and more strings.
Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 65536
_MAX_DIMENSION = 2**48
_TENSOR_BYTES = 32  # of the shortest entry of the table
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")  # stands before every string


@dataclass(frozen=True, repr=False)
class Array:
    """`count` strings or numbers of one key, which lie in the file and are not yet decoded."""

    path: Path
    key: str
    kind: int
    count: int
    encoded: memoryview

    def __repr__(self) -> str:
        return f"<array of {self.count:,} values>"

    def values(self) -> list[Any]:
        """Raises ArtifactError for a string that is not UTF-8."""
        if self.kind != _STRING:
            return list(struct.unpack(f"<{self.count}{_NUMBERS[self.kind]}", self.encoded))
        data, length_at, offset, strings = bytes(self.encoded), _LENGTH.unpack_from, 0, []
        try:
            for _ in range(self.count):  # most of the time of loading a tokenizer's metadata
                start = offset + 8
                offset = start + length_at(data, offset)[0]
                strings.append(data[start:offset].decode())
        except UnicodeDecodeError as error:
            raise _format_error(
                self.path, f"key {self.key!r}: a string that is not UTF-8"
            ) from error
        return strings


@dataclass(frozen=True)
class TensorEntry:
    """One line of the table. `shape` is NumPy's: the last dimension is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: int  # GGML's number of it
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
        """The error for a file that contradicts the format."""
        return _format_error(self.path, what)


# By path and state of the file. The references are weak: the owner of a header says how long the
# file stays mapped.
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
    """Reads from the first byte on; every step is checked against the end of the file."""

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
                "fetch the file again, and look what it is: an error page, or another format",
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
        """Walk over `count` strings; one tight loop, most of the time of reading a header."""
        data, size, position = self._data, len(self._data), self._position
        if count * 8 > size - position:
            raise self._broken(f"{count:,} strings announced, {size - position:,} bytes left")
        length_at = _LENGTH.unpack_from
        try:
            for _ in range(count):
                position += 8 + length_at(data, position)[0]
        except (struct.error, OverflowError):  # the last length pointed far away
            position = size + 1
        if position > size:
            raise self._broken("its strings go on past the end of the file")
        self._position = position

    def _number(self, layout: str) -> Any:
        start = self._skip(struct.calcsize(layout))
        return struct.unpack_from(f"<{layout}", self._data, start)[0]

    def _layout(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._broken(f"value type {kind} is unknown")
        return _NUMBERS[kind]

    def _skip(self, length: int) -> int:
        """Move on by `length` bytes; the position before."""
        start = self._position
        if length > len(self._data) - start:
            raise self._broken(f"{length:,} bytes announced, {len(self._data) - start:,} left")
        self._position = start + length
        return start

    def _broken(self, what: str) -> ArtifactError:
        return _format_error(self._path, f"{self._place}: {what} (near byte {self._position:,})")


def _format_error(path: Path, what: str) -> ArtifactError:
    return ArtifactError(
        f"{path}: not a valid GGUF file: {what}",
        "the file is cut off or damaged: fetch it again",
    )
