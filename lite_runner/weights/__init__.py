"""Checkpoints: readers of every format, the names in each, and writers that leave no half file.

In this module: lazy tensors, whose shape and type are known, and whose values are mapped from disk
or computed from others when they are read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.quantization import Scheme
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from lite_runner.weights.formats.gguf_blocks import BlockMatrix
    from lite_runner.weights.quantization.quantized import QuantizedTensor

HUGE_PAGE = 2 << 20  # bytes
MAPPED_AROUND = HUGE_PAGE  # bytes around a touched page that Linux maps along with it, at most


def map_file(path: Path, *, private: bool = False) -> NDArray[np.uint8]:
    """The bytes of `path` as a memory map, uint8 [size]: read-only, or `private`, which may be
    written to without changing the file, and is read from disk by huge pages where Linux can.

    Raises ArtifactError if the file is empty or cannot be read.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise ArtifactError(f"{path}: the file is empty", "fetch or write it again")
        if not private:
            return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(mapped, np.uint8)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error


def drop_pages(array: NDArray[Any]) -> None:
    """Drop the pages of the mapped file that `array` is a view of from the process's memory.

    They are read again when touched. Otherwise everything that was read counts as resident memory.
    Does nothing for an array that is not a view of a mapped file.
    """
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    base = whole.base.obj if isinstance(whole.base, memoryview) else whole.base
    if isinstance(base, mmap.mmap) and array.size:
        # The kernel also maps pages around a touched one (64 KiB; a whole folio of the page cache
        # from Linux 6.18 on): drop these too.
        first, end = (bound - whole.ctypes.data for bound in np.byte_bounds(array))
        start = max(0, first - MAPPED_AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(whole.nbytes, end + MAPPED_AROUND)
        base.madvise(mmap.MADV_DONTNEED, start, end - start)


def first_bytes(path: Path, count: int) -> bytes:
    """At most `count` bytes from the start of `path`."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error


Index = tuple[slice, ...]  # a slice an axis, without steps
# BF16 has no NumPy type: its raw arrays are uint16, the upper half of a float32.
DType = Literal["F32", "F16", "BF16"]
# From here on numbers round to infinity.
LIMITS = {"F16": np.float32(65520), "BF16": np.float32(2.0**128 * (1 - 2.0**-9))}
_NAN = np.uint16(0x7FC0)  # as BF16
CHUNK = 1 << 22  # bytes copied at a time: they stay in the processor's cache
COMPARED_AT_ONCE = 1 << 22  # values; bounds the memory of comparing large tensors


@dataclass(frozen=True)
class LazyIntegers:
    """The quantized weights of a matrix [out, in], read on demand."""

    scheme: Scheme
    read: Callable[[], QuantizedTensor]
    stored: bool  # as in the file; False: quantized when read
    optional: bool = False  # fall back to the tensor's floats if they cannot be read
    block_type: str = ""  # of the file's blocks that are requantized: see LazyTensor
    ordered: bool = False  # the columns may be in another order than the inputs
    file_bits: int = 0  # bits of a number in the file, where fewer than here


@dataclass(frozen=True)
class LazyBlocks:
    """A matrix [out, in] in the blocks of its GGUF file, read on demand."""

    type_name: str
    nbytes: int
    read: Callable[[], BlockMatrix]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose values are read on demand. `read` returns the stored bits, C-contiguous.

    `part` reads only a slice; None: only the whole can be read. `integers`: the quantized form of a
    matrix, always [out, in]; None: floats only. `block_type`: of the file's quantized blocks, such
    as Q4_K, or the layout of another tool, such as GPTQ; "": none. `blocks`: a matrix in them, for
    operators that compute with them.
    """

    shape: tuple[int, ...]
    dtype: DType
    read: Callable[[], NDArray[Any]]
    part: Callable[[Index], NDArray[Any]] | None = None
    integers: LazyIntegers | None = None
    block_type: str = ""
    blocks: LazyBlocks | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "F32" else 2)

    def piece(self, index: Index) -> NDArray[Any]:
        """The stored bits of a slice, C-contiguous; may be a read-only view."""
        return np.ascontiguousarray(self.read()[index]) if self.part is None else self.part(index)

    def chunks(self, limit: int) -> Iterator[NDArray[Any]]:
        """The values in their order, in arrays of about `limit` bytes where slices are cheap."""
        if self.part is None or self.nbytes <= limit or not self.shape:
            yield self.read()
            return
        rest = (slice(None),) * (len(self.shape) - 1)
        rows = max(1, limit * self.shape[0] // self.nbytes)
        for start in range(0, self.shape[0], rows):
            yield self.part((slice(start, min(start + rows, self.shape[0])), *rest))

    def float32(self) -> NDArray[np.float32]:
        """The values as float32; exact for all three types. May be a read-only view."""
        return widened(self.read())


def widened(raw: NDArray[Any]) -> NDArray[np.float32]:
    """Stored bits as float32; exact for all three types. May be the same array."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)


def narrowed(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """float32 as stored bits, rounded to the nearest, ties to even. May be the same array."""
    if dtype == "BF16":
        return to_bfloat16(values)
    return values.astype(np.float16 if dtype == "F16" else np.float32, copy=False)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The stored bits of the nearest bfloat16, ties to even; of numbers, not of NaN."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def derived(
    tensor: LazyTensor, shape: tuple[int, ...], change: Callable[[NDArray[Any]], NDArray[Any]]
) -> LazyTensor:
    """`change` applied to what `tensor` holds; it moves values and never computes new ones."""
    return LazyTensor(shape, tensor.dtype, lambda: _copied(tensor.read(), change).reshape(shape))


def watched(tensor: LazyTensor, look: Callable[[NDArray[Any]], None]) -> LazyTensor:
    """The floats of a tensor, of which `look` is given each array before it is used."""

    def shown(array: NDArray[Any]) -> NDArray[Any]:
        look(array)
        return array

    part = tensor.part
    return LazyTensor(
        tensor.shape,
        tensor.dtype,
        lambda: shown(tensor.read()),
        None if part is None else lambda index: shown(part(index)),
    )


def cast(name: str, tensor: LazyTensor, dtype: DType) -> LazyTensor:
    """The tensor `name` in another type, each value rounded to the nearest; infinity and NaN stay.

    Reading raises ArtifactError where a number is too large for it.
    """
    if tensor.dtype == dtype:
        return tensor

    def read() -> NDArray[Any]:
        values = tensor.float32()
        if dtype == "F32":
            return values
        if ((np.abs(values) >= LIMITS[dtype]) & np.isfinite(values)).any():
            wider = "BF16 or F32" if dtype == "F16" else "F32"
            raise ArtifactError(f"tensor {name}: has values too large for {dtype}", f"take {wider}")
        with np.errstate(over="ignore"):  # some processors say so of infinity
            rounded = narrowed(values, dtype)
        if dtype == "BF16" and (not_numbers := np.isnan(values)).any():
            rounded = np.where(not_numbers, _NAN, rounded)
        return rounded

    return LazyTensor(tensor.shape, dtype, read)


def shifted(tensor: LazyTensor, by: float) -> LazyTensor:
    """Every value plus `by`, as F32: a sum has more bits than its parts."""
    return LazyTensor(tensor.shape, "F32", lambda: tensor.float32() + np.float32(by))


def transposed(tensor: LazyTensor) -> LazyTensor:
    """[a, b] as [b, a]; integers and blocks are [out, in] all the same."""

    def piece(index: Index) -> NDArray[Any]:
        return _copied(tensor.piece(index[::-1]), lambda array: array.T)

    return replace(
        derived(tensor, tensor.shape[::-1], lambda array: array.T),
        integers=tensor.integers,
        block_type=tensor.block_type,
        blocks=tensor.blocks,
        part=None if tensor.part is None else piece,
    )


def with_rows(
    tensor: LazyTensor, shape: tuple[int, ...], change: Callable[[NDArray[Any]], NDArray[Any]]
) -> LazyTensor:
    """The tensor of that `shape` once `change` has moved its rows, or taken some; and so its
    integers and its blocks, which run along the rows."""
    integers, blocks = tensor.integers, tensor.blocks
    if integers is not None:
        read = integers.read
        integers = replace(integers, read=lambda: read().with_rows(change))
    if blocks is not None:
        read_blocks = blocks.read
        blocks = replace(blocks, read=lambda: read_blocks().with_rows(change))
    moved = derived(tensor, shape, change)
    return replace(moved, integers=integers, block_type=tensor.block_type, blocks=blocks)


def _copied(stored: NDArray[Any], change: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
    """`change` of what was read, C-contiguous; a file's pages that were copied are let go."""
    result = np.ascontiguousarray(change(stored))
    if not np.may_share_memory(result, stored):
        drop_pages(stored)
    return result


def same_values(one: LazyTensor, other: LazyTensor) -> bool:
    """True if both hold the same bits (the same values, where the types differ)."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        left, right = one.read(), other.read()
        if left.dtype != np.uint16:
            bits = f"u{left.dtype.itemsize}"
            left, right = left.view(bits), right.view(bits)
    else:
        left, right = one.float32(), other.float32()
    left, right = left.reshape(-1), right.reshape(-1)
    return all(
        np.array_equal(left[i : i + COMPARED_AT_ONCE], right[i : i + COMPARED_AT_ONCE])
        for i in range(0, left.size, COMPARED_AT_ONCE)
    )
