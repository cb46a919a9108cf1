"""Quantized matrices: quantization and dequantization.

Rows are processed in chunks, so that little more than the result is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.quantization import Scheme
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass

REFITS = 2  # of a group's scales, at most
STEPS_TO_LARGEST = (7.0, 7.5, 8.0, 8.5, 9.0)  # 4 bits around zero; values beyond are clipped
UNSEEN = 1e-4  # of a group's mean: the least importance of an input that a text never has
VALUES_AT_ONCE = 1 << 18  # a working set that stays in the L2 cache


Codes = Literal["integers", "e4m3"]


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized matrix [rows, columns] (out, in): value = scale * (q - zero) + minimum.

    The last five fields are of the layouts of other tools.
    """

    bits: int  # 8: int8 [rows, columns]; 4: uint8 [rows, columns / 2], low nibble: even column
    group: int  # columns that share a scale; 0: the whole row
    values: NDArray[np.int8] | NDArray[np.uint8]
    # float32 [rows] for group 0, else [rows, columns / group]: float16, of other tools float32 too,
    # or bfloat16 (uint16, see DType)
    scales: NDArray[Any]
    # 4 bits: float16 [rows, columns / group], q is 0..15; 8 bits: None, q is -127..127
    minimums: NDArray[np.float16] | None
    zero: int = 0
    zeros: NDArray[np.int8] | None = None  # [rows, columns / group]; None: `zero` everywhere
    order: NDArray[np.int32] | None = None  # [columns]: the input of each column; None: as they lie
    codes: Codes = "integers"  # e4m3: q is a float of 8 bits, in a uint8
    table: NDArray[np.float32] | None = None  # [16]: the value of each q of 4 bits

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        rows, width = self.values.shape
        return rows, width * (8 // self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of the integers, the scales, and the minimums or zeros."""
        arrays = (self.values, self.scales, self.minimums, self.zeros)
        return sum(one.nbytes for one in arrays if one is not None)

    @property
    def smallest(self) -> NDArray[np.float32]:
        """The value of q = 0 in each group, of 4 bits."""
        if self.minimums is not None:
            return self.minimums.astype(np.float32)
        zeros = self.zero if self.zeros is None else self.zeros.astype(np.float32)
        lowest: NDArray[np.float32] = -_widened(self.scales) * zeros
        return lowest

    @property
    def sound(self) -> bool:
        """True if scales and minimums are finite and no integer is -128, as every quantizer has
        it; false of a damaged file."""
        finite = np.isfinite(self.scales).all() and (
            self.minimums is None or np.isfinite(self.minimums).all()
        )
        return bool(finite) and (self.bits == 4 or self.values.min(initial=0) > -128)

    def alike(self, other: QuantizedTensor) -> bool:
        """True if both can be packed as one: the same layout and order of inputs."""
        mine, theirs = (
            (one.bits, one.group, one.scales.dtype, one.zero, one.zeros is None, one.codes)
            for one in (self, other)
        )
        arrays = ((self.order, other.order), (self.table, other.table))
        return mine == theirs and all(
            np.array_equal(_listed(one), _listed(another)) for one, another in arrays
        )

    def with_rows(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> QuantizedTensor:
        """`change`, which moves rows or takes some of them, applied to all arrays."""
        return self._with_arrays(lambda array, columns: change(array))

    @property
    def is_own_bytes(self) -> bool:
        """True for the 8 bits of this project and GGUF files."""
        plain = self.zeros is None and self.order is None and self.codes == "integers"
        return plain and self.bits == 8 and self.group in (0, 32)

    def with_more_rows(self, others: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """The concatenated rows of matrices that are `alike`."""
        names = ("values", "scales", "minimums", "zeros")
        arrays = {name: [getattr(one, name) for one in (self, *others)] for name in names}
        present = {name: each for name, each in arrays.items() if each[0] is not None}
        joined: dict[str, Any] = {name: np.concatenate(each) for name, each in present.items()}
        return replace(self, **joined)

    def with_columns(self, start: int, stop: int) -> QuantizedTensor:
        """Some columns, whole groups; not of a matrix with its inputs in another order."""
        assert self.order is None

        def some(array: NDArray[Any], each: int) -> NDArray[Any]:
            return array[:, start // each : stop // each] if each else array

        return self._with_arrays(some)

    def _with_arrays(self, change: Callable[[NDArray[Any], int], NDArray[Any]]) -> QuantizedTensor:
        """`change` gets each array, and how many columns share one of its numbers; 0: all."""

        def changed(array: NDArray[Any] | None, each: int) -> Any:
            return None if array is None else np.ascontiguousarray(change(array, each))

        return replace(
            self,
            values=changed(self.values, 8 // self.bits),
            scales=changed(self.scales, self.group),
            minimums=changed(self.minimums, self.group),
            zeros=changed(self.zeros, self.group),
        )

    def float32(self) -> NDArray[np.float32]:
        """The dequantized values [rows, columns]."""
        result = np.empty(self.shape, np.float32)
        rows, columns = self.shape
        step = max(1, VALUES_AT_ONCE // max(columns, 1))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            scales = _widened(self.scales[part])
            q = self._numbers(part)
            grouped = q.reshape(len(q), -1, self.group or columns)
            into = result[part].reshape(grouped.shape)
            if self.zeros is not None:
                grouped = grouped - self.zeros[part, :, None].astype(np.int16)
            elif self.zero:
                grouped = grouped.astype(np.int16) - self.zero
            np.multiply(grouped, scales.reshape(len(q), -1, 1), out=into)
            if self.minimums is not None:
                into += self.minimums[part, :, None].astype(np.float32)
            if self.order is not None:
                result[part][:, self.order] = into.reshape(len(q), columns).copy()
        return result

    def _numbers(self, rows: slice) -> NDArray[Any]:
        """The values q of some rows."""
        values: NDArray[Any] = self.values[rows]
        if self.codes == "e4m3":
            return float8(values)
        if self.table is not None:
            return self.table[unpacked(values)]
        return unpacked(values) if self.bits == 4 else values


# Values of MXFP4's 4-bit codes: floats with two bits of exponent and one of fraction.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_E2M1, *(-one for one in _E2M1)], np.float32)


def powers_of_two(exponents: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """2 ** (exponent - 127) as bfloat16; infinite for 255, which is not a number."""
    return np.maximum(exponents.astype(np.uint16) << 7, 0x40).astype(np.uint16)


def float8(values: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Floats of 8 bits, e4m3: 2 ** 8 times the float16 with the same exponent and fraction."""
    wide = values.astype(np.uint16)
    halves = (wide & 0x7F) << 7 | (wide & 0x80) << 8
    return halves.view(np.float16).astype(np.float32) * np.float32(256)


def _listed(array: NDArray[Any] | None) -> NDArray[Any]:
    return np.empty(0) if array is None else array


def _widened(scales: NDArray[Any]) -> NDArray[np.float32]:
    """Scales as float32; bfloat16 are the upper halves of float32."""
    if scales.dtype == np.uint16:
        return (scales.astype(np.uint32) << 16).view(np.float32)
    return scales.astype(np.float32)


def packed(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack values 0..15 [..., n] into bytes [..., n / 2], the even one in the low nibble."""
    pairs = np.ascontiguousarray(nibbles).view("<u2")
    bytes_: NDArray[np.uint8] = (pairs | pairs >> 4).astype(np.uint8)
    return bytes_


def unpacked(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The inverse of `packed`."""
    wide = pairs.astype("<u2")
    nibbles: NDArray[np.uint8] = ((wide & 0x0F) | (wide & 0xF0) << 4).view(np.uint8)
    return nibbles


def check_columns(columns: int, scheme: Scheme, name: str) -> None:
    """Raise ArtifactError where the groups do not divide the rows of a matrix."""
    if scheme.group and columns % scheme.group:
        fitting = [size for size in (128, 64, 32) if columns % size == 0]
        raise ArtifactError(
            f"{name}: {columns} columns, expected a multiple of the group of {scheme.group}",
            f"quant_group={fitting[0]}"
            if scheme.bits == 4 and fitting
            else "quant=a16w8, which has no groups",
        )


def quantize(
    weight: NDArray[np.float32],
    bits: int,
    group: int,
    name: str = "matrix",
    importance: NDArray[np.floating[Any]] | None = None,
) -> QuantizedTensor:
    """The nearest integers to `weight` [out, in].

    8 bits: symmetric, scale = largest / 127; 4 bits (in groups): between the smallest and the
    largest, errors weighed by the `importance` of their columns. Raises ArtifactError, in which
    `name` is the matrix, for values that are not finite or too large for float16 scales, and for a
    group that does not divide the columns.
    """
    rows, columns = weight.shape
    return quantize_rows([weight], (rows, columns), Scheme(bits, group), name, importance)


def quantize_rows(
    pieces: Iterable[NDArray[np.float32]],
    shape: tuple[int, int],
    scheme: Scheme,
    name: str,
    importance: NDArray[np.floating[Any]] | None = None,
) -> QuantizedTensor:
    """As `quantize`, of rows that come in `pieces` and together are of the `shape`."""
    rows, columns = shape
    check_columns(columns, scheme, name)
    shares = _shares(importance, scheme.group)
    groups = columns // scheme.group if scheme.group else 1
    scales = np.empty((rows, groups), np.float16 if scheme.group else np.float32)
    minimums = np.empty((rows, groups), np.float16) if scheme.bits == 4 else None
    values: NDArray[Any] = (
        np.empty((rows, columns // 2), np.uint8)
        if scheme.bits == 4
        else np.empty((rows, columns), np.int8)
    )
    step = max(1, VALUES_AT_ONCE // max(columns, 1))
    row = 0
    for piece in pieces:
        for start in range(0, len(piece), step):
            weight = piece[start : start + step]
            part = slice(row, row + len(weight))
            grouped = weight.reshape(len(weight), groups, -1)
            # Values that are not finite, or overflow float16, are found in the scales.
            with np.errstate(over="ignore", invalid="ignore"):
                if minimums is None:
                    scales[part], values[part] = _symmetric(grouped, scales.dtype, columns)
                else:
                    scales[part], minimums[part], values[part] = _between(grouped, shares, columns)
            _check_finite(scales[part], minimums, part, name)
            row += len(weight)
    return QuantizedTensor(
        scheme.bits, scheme.group, values, scales if scheme.group else scales[:, 0], minimums
    )


def quantize_to_4_bits(
    weight: NDArray[np.float32],
    group: int,
    name: str = "matrix",
    importance: NDArray[np.floating[Any]] | None = None,
    *,
    around_zero: bool,
) -> QuantizedTensor:
    """As `quantize`, or as `quantize_around_zero`."""
    if around_zero:
        return quantize_around_zero(weight, group, name, importance)
    return quantize(weight, 4, group, name, importance)


def quantize_around_zero(
    weight: NDArray[np.float32],
    group: int,
    name: str = "matrix",
    importance: NDArray[np.floating[Any]] | None = None,
) -> QuantizedTensor:
    """As `quantize` to 4 bits, but that value = scale * (q - 8): the form that compressed-tensors,
    GPTQ and AWQ call symmetric. The range of a group is cut as long as its error falls."""
    rows, columns = weight.shape
    check_columns(columns, Scheme(4, group), name)
    scales = np.empty((rows, columns // group), np.float16)
    values = np.empty((rows, columns // 2), np.uint8)
    shares = _shares(importance, group)
    step = max(1, VALUES_AT_ONCE // max(columns, 1))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        x = weight[part].reshape(-1, columns // group, group)
        with np.errstate(over="ignore", invalid="ignore"):
            scales[part], q = _around_zero(x, shares)
        _check_finite(scales[part], None, part, name)
        values[part] = packed(q.reshape(len(x), -1))
    return QuantizedTensor(4, group, values, scales, None, zero=8)


def _shares(
    importance: NDArray[np.floating[Any]] | None, group: int
) -> NDArray[np.float32] | np.float32:
    """Weights of the columns' errors in their group [groups, group], summing to 1; a number if all
    are equal."""
    if importance is None or not group:
        return np.float32(1 / max(group, 1))
    each = importance.reshape(-1, group).astype(np.float64)
    each += np.maximum(UNSEEN * each.mean(-1, keepdims=True), 1e-30)
    shares: NDArray[np.float32] = (each / each.sum(-1, keepdims=True)).astype(np.float32)
    return shares


def _around_zero(
    x: NDArray[np.float32], shares: NDArray[np.float32] | np.float32
) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Scales [n, groups] and 0..15 of x [n, groups, group]."""
    largest = np.maximum(x.max(-1), -x.min(-1))
    scales, least = np.zeros(largest.shape, np.float16), np.full(largest.shape, np.inf, np.float32)
    numbers = np.zeros(x.shape, np.uint8)
    for steps in STEPS_TO_LARGEST:
        scale = (largest / np.float32(steps)).astype(np.float16)
        for _ in range(2):  # the second time with the best scale for these integers
            q, error = _nearest(x, scale, -8 * scale.astype(np.float32), shares)
            better = ~(error >= least) | ~np.isfinite(scale)
            scales[better], numbers[better], least[better] = scale[better], q[better], error[better]
            q -= 8
            squares = (shares * q * q).sum(-1)
            fitted = (shares * q * x).sum(-1) / np.where(squares > 0, squares, 1)
            scale = np.maximum(fitted, 0).astype(np.float16)
    return scales, numbers


def _symmetric(
    x: NDArray[np.float32], dtype: np.dtype[Any], columns: int
) -> tuple[NDArray[Any], NDArray[np.int8]]:
    """Scales [n, groups] and int8 [n, columns] of x [n, groups, group]."""
    largest = np.maximum(x.max(-1), -x.min(-1))
    scales = (largest / np.float32(127)).astype(dtype)
    q = np.rint(x * _inverse(scales))
    # With a scale rounded down to float16 the largest value would become 128.
    np.clip(q, -127, 127, out=q)
    return scales, q.astype(np.int8).reshape(-1, columns)


def _between(
    x: NDArray[np.float32], shares: NDArray[np.float32] | np.float32, columns: int
) -> tuple[NDArray[np.float16], NDArray[np.float16], NDArray[np.uint8]]:
    """Scales and minimums [n, groups] and packed nibbles [n, columns / 2] of [n, groups, group].

    Scale and minimum begin with the smallest and largest value; then they are fitted to the
    integers by least squares, and the integers to them, as long as a group's error falls. Both
    are rounded to float16 before the integers are chosen, which make up for some of it.
    """
    low = x.min(-1).astype(np.float16)
    scale = np.maximum((x.max(-1) - low.astype(np.float32)) / np.float32(15), 0).astype(np.float16)
    q, error = _nearest(x, scale, low, shares)
    mean = (shares * x).sum(-1)
    for _ in range(REFITS):
        if not error.any():
            break
        centre = (shares * q).sum(-1)
        centred = q - centre[..., None]
        weighed = shares * centred
        spread = (weighed * centred).sum(-1)
        slope = np.divide((weighed * x).sum(-1), spread, out=np.zeros_like(mean), where=spread > 0)
        slope = np.maximum(slope, 0).astype(np.float16)
        offset = (mean - slope.astype(np.float32) * centre).astype(np.float16)
        better, less = _nearest(x, slope, offset, shares)
        won = less < error
        scale, low = np.where(won, slope, scale), np.where(won, offset, low)
        q, error = np.where(won[..., None], better, q), np.where(won, less, error)
    return scale, low, packed(q.astype(np.uint8).reshape(-1, columns))


def _nearest(
    x: NDArray[np.float32],
    scales: NDArray[np.float16],
    minimums: NDArray[Any],
    shares: NDArray[np.float32] | np.float32,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The best 0..15 [n, groups, group] for scales and minimums, and each group's squared error."""
    low, scale = minimums.astype(np.float32)[..., None], scales.astype(np.float32)[..., None]
    q = (x - low) * _inverse(scales)
    np.rint(q, out=q)
    np.clip(q, 0, 15, out=q)
    difference = x - (scale * q + low)
    return q, (shares * difference * difference).sum(-1)


def _inverse(scales: NDArray[Any]) -> NDArray[np.float32]:
    """1 / scale [n, groups, 1]; 0 for a scale of 0."""
    wide = scales.astype(np.float32)[..., None]
    # The smallest float32 scales have no finite inverse: such weights become 0.
    safe = wide > np.float32(1e-38)
    return np.divide(1, wide, out=np.zeros_like(wide), where=safe)


def _check_finite(
    scales: NDArray[Any], minimums: NDArray[np.float16] | None, part: slice, name: str
) -> None:
    if not np.isfinite(scales).all() or (
        minimums is not None and not np.isfinite(minimums[part]).all()
    ):
        what = "values that are not finite"
        if scales.dtype == np.float16:
            what += ", or too large for the float16 scales of a group"
        raise ArtifactError(
            f"{name}: {what}, in the rows from {part.start}",
            "the checkpoint may be damaged; quant=none takes it as it is",
        )
