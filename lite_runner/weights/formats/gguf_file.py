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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights.formats.gguf_blocks import SCHEMES, BlockMatrix, dequantize, integers_of
from lite_runner.weights.formats.gguf_metadata import MAGIC, GGUFHeader, TensorEntry, read_header
from lite_runner.weights.formats.safetensors_file import view_tensor
from lite_runner.weights.memory_map import first_bytes
from lite_runner.weights.tensor import DType, LazyBlocks, LazyIntegers, LazyTensor

STORED_TYPES: dict[str, DType] = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
QUANTIZED_TYPES = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),
)
# Of the types above, and of others, as the library has them, whose import takes 40 ms: GGML's
# number, the name, the values of a block and its bytes.
TYPES = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110)},
    **{12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176)},
    **{14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136)},
}


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
        dtype = STORED_TYPES.get(self.type_name)
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
        return any(one.type_name not in STORED_TYPES for one in self.tensors.values())


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
            raise part.fault(f"split.no and split.count are {place}, expected {(number, count)}")
        found = _tensors(part)
        if twice := tensors.keys() & found.keys():
            raise part.fault(f"tensor {min(twice)!r} is in a part before it, too")
        tensors |= found
    total = headers[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise headers[0].fault(f"its parts hold {len(tensors)} tensors, expected {total!r}")
    return GGUFFile(headers[0], tensors, tuple(headers[1:]))


def _tensors(header: GGUFHeader) -> dict[str, GGUFTensor]:
    alignment = header.metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise header.fault(f"general.alignment {alignment!r}, expected a power of two")
    start = _padded(header.end, alignment)
    data = np.frombuffer(header.data, np.uint8)
    tensors: dict[str, GGUFTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for entry in header.tensors:
        type_name = _type_name(header, entry)
        begin = start + entry.offset
        end = begin + _byte_size(header.path, entry, type_name)
        if entry.offset % alignment or end > data.size:
            raise header.fault(
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
            raise header.fault(f"tensor {name!r} at byte {begin:,}, expected {position:,}: {kind}")
        position = _padded(end, alignment)
    if len(header.data) > position:
        raise header.fault(f"{len(header.data) - position:,} bytes follow the last tensor")


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _type_name(header: GGUFHeader, entry: TensorEntry) -> str:
    if entry.type in TYPES:
        return TYPES[entry.type][0]
    from gguf.constants import GGMLQuantizationType

    try:
        name: str = GGMLQuantizationType(entry.type).name
    except ValueError as error:
        raise header.fault(f"tensor {entry.name!r} has the unknown type {entry.type}") from error
    return name


def _byte_size(path: Path, entry: TensorEntry, type_name: str) -> int:
    if type_name not in STORED_TYPES and type_name not in QUANTIZED_TYPES:
        raise ArtifactError(
            f"{path}: tensor {entry.name} is of type {type_name}, expected one of "
            f"{', '.join((*STORED_TYPES, *QUANTIZED_TYPES))}",
            "take a file of another quantization, such as Q4_K_M or Q8_0",
        )
    _, block, size = TYPES[entry.type]
    if entry.shape[-1] % block:
        raise ArtifactError(
            f"{path}: tensor {entry.name} {list(entry.shape)} has rows of {entry.shape[-1]} "
            f"values, expected a multiple of {block} for {type_name}"
        )
    return math.prod(entry.shape) // block * size
