"""A quantized matrix of another tool's layout, read on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.quantization import Scheme
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights import LazyIntegers, LazyTensor, widened
from lite_runner.weights.formats.packed_layouts import PackedLayout
from lite_runner.weights.quantization.quantized import Codes, QuantizedTensor

if TYPE_CHECKING:
    from lite_runner.weights.formats.safetensors_file import StoredTensor

Tensor: TypeAlias = "StoredTensor | LazyTensor"
MOST_GROUP, GROUP_STEP = 256, 8  # group sizes that the native kernels support
TYPES = {
    **{"I32": np.uint32, "I8": np.int8, "U8": np.uint8, "F8_E4M3": np.uint8, "I64": np.int64},
    **{"U64": np.uint64, "I4": np.uint8},  # two per byte
}


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [out, in] whose tensors are read on demand."""

    where: str
    shape: tuple[int, int]
    bits: int  # in the file
    group: int  # columns that share a scale
    # Columns in this order, or as they are (None), as QuantizedTensor has them.
    values: Callable[[NDArray[Any] | None], NDArray[Any]]
    scales: Callable[[], NDArray[Any]]  # [rows / block, groups]
    zeros: Callable[[], NDArray[Any]] | None = None  # the same shape; None: the middle of the range
    index: Callable[[], NDArray[np.int64]] | None = None  # the group of each column
    codes: Codes = "integers"
    zero: int = 0  # without zero points
    block: int = 1  # rows that share a scale
    scale_bytes: int = 2
    table: Callable[[], NDArray[np.float32]] | None = None  # the values of 4-bit codes

    def tensor(self, layout: PackedLayout) -> LazyTensor:
        """The matrix as a tensor, with its integers where the kernels take groups of that
        size."""
        (_, columns), wide = self.shape, self.bits == 8
        if not wide and columns % GROUP_STEP:
            raise broken(self.where, layout.name, f"has {columns} columns, not a multiple of 8")
        whole = self.group >= columns and self.zeros is None and self.table is None
        unit = 0 if whole else unit_of(math.gcd(self.group, columns))
        read, integers = partial(self._read, layout, unit), None
        if columns % GROUP_STEP == 0 and unit % GROUP_STEP == 0:
            of_group = 4 if whole else self.scale_bytes + (self.zeros is not None)
            scheme = Scheme(8 if wide else 4, unit, of_group)
            integers = LazyIntegers(
                scheme,
                read,
                stored=True,
                ordered=self.index is not None and layout.ordered,
                file_bits=self.bits if self.bits < 4 else 0,
            )
        return LazyTensor(
            self.shape, "F32", lambda: read().float32(), integers=integers, block_type=layout.name
        )

    def _read(self, layout: PackedLayout, unit: int) -> QuantizedTensor:
        rows, columns = self.shape
        order = None if self.index is None else self._order(layout, self.index())
        values, scales = self.values(order), self.scales()
        if self.codes == "e4m3" and (values & 0x7F == 0x7F).any():
            raise broken(self.where, layout.name, "has a weight that is not a number")
        table = None if self.table is None else self.table()
        if not all(np.isfinite(widened(one)).all() for one in (scales, table) if one is not None):
            raise broken(self.where, layout.name, "has a scale that is not finite")
        places = np.arange(0, columns, unit or columns) // self.group
        lines = np.arange(rows) // self.block

        def of_groups(array: NDArray[Any]) -> NDArray[Any]:
            return np.ascontiguousarray(array[lines][:, places])

        scales, zeros = of_groups(scales), None
        if self.zeros is not None:
            zeros = of_groups(self.zeros())
            if zeros.dtype == np.uint8 and self.bits == 8:
                zeros ^= 0x80
            zeros = zeros.view(np.int8)
        return QuantizedTensor(
            bits=8 if self.bits == 8 else 4,
            group=unit,
            values=values,
            scales=scales if unit else np.ascontiguousarray(widened(scales)[:, 0]),
            minimums=None,
            zero=self.zero,
            zeros=zeros,
            order=order,
            codes=self.codes,
            table=table,
        )

    def _order(self, layout: PackedLayout, index: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """The permutation that makes each group's inputs adjacent; None: they are."""
        order = np.argsort(index, kind="stable").astype(np.int32)
        groups = np.arange(len(index)) // self.group
        if not np.array_equal(index[order], groups):
            why = f"g_idx does not have {self.group} inputs of each group"
            raise broken(self.where, layout.name, why)
        if np.array_equal(index, groups):
            return None
        if not layout.ordered:
            raise broken(self.where, layout.name, "g_idx mixes groups, but desc_act is false")
        return order


class ModuleParts:
    """The tensors that store a matrix, by the last parts of their names."""

    def __init__(self, where: str, parts: Mapping[str, Tensor], layout: PackedLayout) -> None:
        self._where, self._parts, self._layout = where, parts, layout
        self._taken: set[str] = set()

    def _take(
        self, name: str, *types: str, shape: tuple[int, ...] | None = None, dims: int | None = 2
    ) -> Tensor:
        """The tensor NAME, of one of these types, and of a shape or number of dimensions."""
        found = self._parts.get(name)
        if found is None:
            raise self._broken(f"lacks {name}")
        self._taken.add(name)
        if found.dtype not in types:
            raise self._broken(f"{name} is {found.dtype}, expected {' or '.join(types)}")
        if shape is not None and found.shape != shape:
            raise self._broken(f"{name} is {list(found.shape)}, expected {list(shape)}")
        if (shape is None and dims is not None and len(found.shape) != dims) or 0 in found.shape:
            wanted = "a vector" if dims == 1 else "a matrix"
            raise self._broken(f"{name} is {list(found.shape)}, expected {wanted}")
        return found

    def _broken(self, what: str) -> ArtifactError:
        return broken(self._where, self._layout.name, what)


def unit_of(group: int) -> int:
    """The largest group size that the kernels support and that divides a group."""
    fitting = [size for size in range(1, min(group, MOST_GROUP) + 1) if group % size == 0]
    return max([size for size in fitting if size % GROUP_STEP == 0] or fitting)


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The stored values; the bits of bfloat16 and of floats of 8 bits."""
    if isinstance(tensor, LazyTensor):
        return tensor.read()
    stored = tensor.data.view(TYPES[tensor.dtype]).reshape(tensor.shape)
    return np.require(stored, requirements="A")


def bytes_of(scales: Tensor) -> int:
    return 4 if scales.dtype == "F32" else 2


def broken(where: str, name: str, what: str) -> ArtifactError:
    return ArtifactError(
        f"{where}: not a matrix of {name}: {what}",
        "fetch the folder again, its config.json and weights of one revision",
    )
