"""The tensors of a GGUF file: views of their bytes, and dequantization.

The `gguf` library supplies the quantization types and their arithmetic. Its own reader is not
used: it takes seconds over a real vocabulary and trusts the counts in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights.formats.gguf_blocks import SCHEMES, BlockMatrix, dequantize, integers_of
from lite_runner.weights.formats.gguf_metadata import MAGIC, GGUFHeader, TensorEntry, read_header
from lite_runner.weights.formats.safetensors_file import view_tensor
from lite_runner.weights.memory_map import first_bytes
from lite_runner.weights.tensor import DType, LazyBlocks, LazyIntegers, LazyTensor

# GGML's number of each type that is read: its name, the values of a block and its bytes, as the
# library has them, whose import takes 40 ms.
TYPES = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 8: ("Q8_0", 32, 34)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144)},
    **{13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210)},
    **{20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136)},
}
FLOATS: dict[str, DType] = {dtype: dtype for dtype in get_args(DType)}
QUANTIZED_TYPES = tuple(name for name, _, _ in TYPES.values() if name not in FLOATS)


# As llama.cpp names the files of a split checkpoint.
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


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
        count = self.shape[0] if stop is None else stop
        row_bytes = self.data.size // max(self.shape[0], 1)
        data = self.data[start * row_bytes : count * row_bytes]
        shape = (count - start, *self.shape[1:])
        dtype = FLOATS.get(self.type_name)
        if dtype is not None:
            return view_tensor(data, dtype, shape)
        scheme = SCHEMES.get(self.type_name)
        integers = own = None
        if len(shape) == 2:
            matrix = BlockMatrix(self.type_name, data.reshape(shape[0], -1), shape[1])
            own = LazyBlocks(self.type_name, data.nbytes, lambda: matrix)
        if scheme is not None and len(shape) == 2:
            rows, columns = shape
            read = partial(integers_of, data, self.type_name, rows, columns)
            integers = LazyIntegers(scheme, read, True)
        return LazyTensor(
            shape,
            "F32",
            lambda: dequantize(data, self.type_name).reshape(shape),
            integers=integers,
            blocks=self.type_name,
            own=own,
        )


@dataclass(frozen=True)
class GGUFFile:
    """Header and tensors of one file; of a split checkpoint the header of its first file, and the
    tensors of all."""

    header: GGUFHeader
    tensors: dict[str, GGUFTensor]
    others: tuple[GGUFHeader, ...] = ()  # of the other files, held like the first

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.header.path

    @property
    def metadata(self) -> dict[str, Any]:
        """See GGUFHeader."""
        return self.header.metadata

    @property
    def quantized(self) -> bool:
        """True if any of the tensors is in blocks."""
        return any(one.type_name not in FLOATS for one in self.tensors.values())


def looks_like_gguf(path: Path) -> bool:
    """True if the file starts with the magic number."""
    return first_bytes(path, 4) == MAGIC


def parts_of(path: Path) -> list[Path]:
    """The files of the split checkpoint that `path` is one of, in order, there or not; of another
    file it alone."""
    part = _PART.fullmatch(path.name)
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
    """Parse the file; of a split checkpoint all of its files, whichever `path` is. Raises
    ArtifactError for whatever does not follow the format, and where a part is missing."""
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    if count == 1:
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
