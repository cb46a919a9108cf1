"""Packs matrices for the native kernels, alone or several as one, with their biases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.native import library, structs
from lite_runner.native.structs import (
    FEWER_BITS,
    INPUT_GROUP,
    MOST_GROUP,
    PANEL,
    UNITS,
    Block,
    Floats,
    Format,
    Order,
    Part,
    ScaleType,
    StructLayout,
    copied,
)
from lite_runner.records import dataclass
from lite_runner.weights import drop_pages, narrowed, widened
from lite_runner.weights.formats.gguf_blocks import BlockMatrix
from lite_runner.weights.quantization.quantized import QuantizedTensor, quantize

T = TypeVar("T")
_SCALES = {"float16": ScaleType.HALF, "float32": ScaleType.FLOAT32, "uint16": ScaleType.BFLOAT16}
# [out, in]; floats as stored, see LazyTensor
Weight: TypeAlias = NDArray[Any] | QuantizedTensor | BlockMatrix


@dataclass(frozen=True)
class Alternating:
    """Two matrices of one shape with interleaved panels."""

    first: Weight
    second: Weight


@dataclass(frozen=True)
class Stacked:
    """Concatenated matrices with the same input, some of them in GGUF's blocks."""

    parts: tuple[Weight, ...]


def matrix(
    weight: Weight | Alternating | Stacked,
    bias: Floats | tuple[Floats, Floats] | None = None,
    *,
    rounded_input: bool = False,
    dequantize: bool = False,
) -> StructLayout:
    """Pack a matrix in panels with its bias [out] (a pair for Alternating).

    `rounded_input`: the input of an int8 matrix, or of blocks, is quantized to int8 too (groups
    with an outlier: to 16 bits), and that of a matrix in bfloat16 is rounded to bfloat16;
    `dequantize`: a group-quantized matrix, or one in blocks, is stored as float32.
    """
    pair = isinstance(weight, Alternating)
    parts: list[Weight]
    if isinstance(weight, Alternating):
        parts = [weight.first, weight.second]
    elif not isinstance(weight, Stacked):
        parts = [weight]
    else:
        parts = list(weight.parts)
        whole = all(part.shape[0] % PANEL == 0 for part in parts[:-1])
        if dequantize or not whole:
            return matrix(np.concatenate(_alike(parts)[1]), bias)
    assert bias is None or isinstance(bias, tuple) == pair
    blocks = [part for part in parts if isinstance(part, BlockMatrix) and not dequantize]
    if blocks and not _one_type(parts):
        return _joined(parts, bias, rounded_input=rounded_input, by_turns=pair)
    out, inputs = parts[0].shape
    if pair:
        out = 2 * -(-out // PANEL) * PANEL
    fields = structs.Matrix(out=out, inputs=inputs)
    layout = StructLayout(fields)
    if blocks:
        fields.format, fields.rounded_input = Format[blocks[0].type_name], rounded_input
        fields.data = layout.add(_block_panels(blocks))
        _add_bias(layout, fields, bias)
        return layout
    quantized, floats = _alike(parts)
    if quantized and dequantize:
        fields.format = Format.FLOAT32
        fields.data = layout.add(_dequantized_panels(quantized))
    elif quantized:
        _add_integers(layout, fields, quantized, rounded_input and quantized[0].bits == 8)
    else:
        fields.format = _format(floats)
        bfloat16 = fields.format == Format.BFLOAT16
        fields.data = layout.add(panels(floats, 8, bfloat16=bfloat16))
        fields.rounded_input = bfloat16 and rounded_input
    _add_bias(layout, fields, bias)
    return layout


def _joined(
    parts: Sequence[Weight],
    bias: Floats | tuple[Floats, Floats] | None,
    *,
    rounded_input: bool,
    by_turns: bool,
) -> StructLayout:
    """Matrices of different forms packed one after the other, as one."""
    whole = structs.JoinedMatrix(count=len(parts), by_turns=by_turns)
    fields = whole.plain
    fields.format, fields.rounded_input = Format.JOINED, rounded_input
    fields.inputs = parts[0].shape[1]
    rows = [part.shape[0] for part in parts]
    fields.out = sum(-(-one // PANEL) * PANEL for one in rows) if by_turns else sum(rows)
    layout = StructLayout(whole)
    for index, part in enumerate(parts):
        rounded = rounded_input and isinstance(part, BlockMatrix)
        whole.parts[index] = layout.add(matrix(part, rounded_input=rounded))
    _add_bias(layout, fields, bias)
    return layout


def _add_bias(
    layout: StructLayout, fields: structs.Matrix, bias: Floats | tuple[Floats, Floats] | None
) -> None:
    if bias is not None:
        biases = bias if isinstance(bias, tuple) else (bias,)
        fields.bias = layout.add(panels([one[:, None] for one in biases]))


def _add_integers(
    layout: StructLayout, fields: structs.Matrix, parts: list[QuantizedTensor], rounded_input: bool
) -> None:
    first = parts[0]
    bits, group, factor = first.bits, first.group, _integer_factor(first.table)
    assert group <= MOST_GROUP
    fields.group, fields.rounded_input = group, rounded_input
    if first.codes == "e4m3":
        fields.format = Format.FLOAT8
        fields.data = layout.add(panels([part.values for part in parts], 8))
    elif first.table is not None and not factor:
        # Two inputs at a time.
        fields.format, fields.table = Format.TABLE4, layout.add(copied(first.table))
        fields.data = layout.add(panels([part.values for part in parts], 4))
    else:
        if first.table is not None:
            fields.table = layout.add(copied((first.table * factor).astype(np.int8)))
        fields.format = Format.INT4 if bits == 4 else Format.INT8
        order = Order.PLAIN if rounded_input else Order.BYTE_PAIRS
        # Eight inputs at a time.
        words = [_padded(part.values, 1, bits).view(np.uint32) for part in parts]
        fields.data = layout.add(panels(words, order=Order.NIBBLE_PAIRS if bits == 4 else order))
    scales = [part.scales if group else part.scales[:, None] for part in parts]
    if factor > 1:  # exact: only the exponents change
        scales = [_divided(one, factor) for one in scales]
    fields.scales, fields.scale_type = layout.add(panels(scales)), _SCALES[scales[0].dtype.name]
    if minimums := [part.minimums for part in parts if part.minimums is not None]:
        fields.minimums = layout.add(panels(minimums))
    fields.zero = first.zero
    if zeros := [part.zeros for part in parts if part.zeros is not None]:
        fields.zeros = layout.add(panels(zeros))
    if first.order is not None:
        fields.order = layout.add(copied(first.order))
    if rounded_input:
        span = group or INPUT_GROUP
        grouped = [_padded(part.values, 1, span) for part in parts]
        totals = [one.reshape(len(one), -1, span).sum(2, dtype=np.int32) for one in grouped]
        fields.sums = layout.add(panels(totals))


def _integer_factor(table: Floats | None) -> int:
    """The least power of 2 that makes a table of int8 of one of floats; 0: none does."""
    if table is not None:
        for factor in (1, 2, 4, 8):
            entries = table * np.float32(factor)
            if abs(entries).max() <= 127 and (entries == np.rint(entries)).all():
                return factor
    return 0


def _divided(scales: NDArray[Any], factor: int) -> NDArray[Any]:
    divided = widened(scales) / np.float32(factor)
    return narrowed(divided, "BF16") if scales.dtype == np.uint16 else divided


def stacked(parts: Sequence[Weight]) -> Weight | Stacked:
    """Matrices with the same input concatenated along their outputs, if they can be one."""
    blocks = [part for part in parts if isinstance(part, BlockMatrix)]
    if blocks and not _one_type(parts):
        return Stacked(tuple(parts))
    if blocks:
        return replace(blocks[0], data=np.concatenate([part.data for part in blocks]))
    quantized, floats = _alike(parts)
    if not quantized:
        joined: NDArray[Any] = np.concatenate(floats)
        for part in floats:
            drop_pages(part)
        return joined

    return quantized[0].with_more_rows(quantized[1:])


def alike(matrices: Sequence[Weight]) -> Sequence[Weight]:
    """The matrices in forms whose inputs are rounded alike: all in blocks, all quantized with the
    same groups, or all floats."""
    types = {one.type_name if isinstance(one, BlockMatrix) else "" for one in matrices}
    if "" not in types and len({Format[one] in FEWER_BITS for one in types}) == 1:
        return matrices
    quantized, floats = _alike(matrices)
    return quantized or floats


def surplus(weight: Weight, start: int, width: int) -> tuple[int, int]:
    """Columns kept before and after a rank's `width` columns from `start` on, so that no group or
    block is cut."""
    stored = weight.shape[1]
    if isinstance(weight, np.ndarray) or stored == width:
        return 0, 0
    unit = (
        weight.group if isinstance(weight, QuantizedTensor) else UNITS[Format[weight.type_name]][0]
    )
    return start % unit, stored - width - start % unit


def with_zeros(weight: Weight, rows: tuple[int, int]) -> Weight:
    """A matrix padded with rows of zeros before and after its own."""
    if not any(rows):
        return weight

    def change(array: NDArray[Any]) -> NDArray[Any]:
        return np.pad(array, [rows, *[(0, 0)] * (array.ndim - 1)])

    return change(weight) if isinstance(weight, np.ndarray) else weight.with_rows(change)


def _one_type(parts: Sequence[Weight]) -> bool:
    """True if all are in GGUF's blocks of one type."""
    types = {part.type_name if isinstance(part, BlockMatrix) else "" for part in parts}
    return len(types) == 1 and "" not in types


def _alike(parts: Sequence[Weight]) -> tuple[list[QuantizedTensor], list[NDArray[Any]]]:
    """Convert matrices that are packed together to one form: all quantized with the same groups, or
    all floats of one type."""
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(quantized) == len(parts) and all(one.alike(quantized[0]) for one in quantized):
        return quantized, []
    if any(one.order is not None for one in quantized):
        raise ArtifactError(
            "matrices with the same inputs have them in different orders (GPTQ's g_idx), so that"
            " they cannot be multiplied as one",
            "quant=none, which computes with floats, or quant=a16w8",
        )
    if len(quantized) < len(parts) or not all(one.is_own_bytes for one in quantized):
        floats = [part if isinstance(part, np.ndarray) else part.float32() for part in parts]
        one_type = len({part.dtype for part in floats}) == 1
        return [], floats if one_type else [widened(part) for part in floats]
    # Some have a file's own 8-bit groups, others were quantized per row.
    return [quantize(one.float32(), 8, 0) if one.group else one for one in quantized], []


def _padded(array: NDArray[Any], axis: int = 0, multiple: int = PANEL) -> NDArray[Any]:
    """Zero-pad an axis to a multiple."""
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    return np.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])


def _format(parts: Sequence[NDArray[Any]]) -> Format:
    """Storage format of floats: as stored, or bfloat16 if that is exact."""
    if parts[0].dtype == np.float16:
        return Format.FLOAT16
    return Format.BFLOAT16 if all(_is_bfloat16(part) for part in parts) else Format.FLOAT32


def _is_bfloat16(weight: NDArray[Any]) -> bool:
    if weight.dtype == np.uint16:
        return True
    bits = weight.view(np.uint32)
    return not (bits[:1] & 0xFFFF).any() and not any(
        (bits[start : start + 256] & 0xFFFF).any() for start in range(0, len(bits), 256)
    )


def _in_panels(
    parts: Sequence[T], rows: int, panel_bytes: int, write_part: Callable[[T, int, int], None]
) -> Part:
    """Parts of one shape as panels, interleaved if there are two. `write_part` gets a part, the
    stride of its panels in panels, and the address of the first."""

    def write(target: Block) -> None:
        for index, part in enumerate(parts):
            write_part(part, len(parts), target.ctypes.data + index * panel_bytes)

    return Part(len(parts) * -(-rows // PANEL) * panel_bytes, write)


def panels(
    arrays: Sequence[NDArray[Any]],
    multiple: int = 1,
    *,
    bfloat16: bool = False,
    order: Order = Order.PLAIN,
) -> Part:
    """Arrays [out, n] as panels [out / 32, n, 32], zero-padded.

    n is padded to a `multiple`; float32 may be stored as bfloat16 if that is exact; `order`: of the
    integers in a word.
    """
    rows, width = arrays[0].shape
    padded = -(-width // multiple) * multiple
    size = 2 if bfloat16 else arrays[0].itemsize

    def write(array: NDArray[Any], stride: int, address: int) -> None:
        sizes = (*array.shape, padded, array.itemsize, size)
        library().lite_runner_pack(array.ctypes.data, *sizes, order, stride, address)
        drop_pages(array)  # a mapped file's pages are not read again

    contiguous = [np.ascontiguousarray(array) for array in arrays]
    return _in_panels(contiguous, rows, PANEL * padded * size, write)


def _block_panels(parts: Sequence[BlockMatrix]) -> Part:
    """Matrices in GGUF's blocks of one type as panels of units: see BlockForm in src/layers.h."""
    format = Format[parts[0].type_name]
    (rows, inputs), (span, nbytes) = parts[0].shape, UNITS[format]

    def write(part: BlockMatrix, stride: int, address: int) -> None:
        data = np.ascontiguousarray(part.data)
        library().lite_runner_pack_blocks(data.ctypes.data, format, *part.shape, stride, address)
        drop_pages(data)

    return _in_panels(parts, rows, inputs // span * nbytes, write)


def _dequantized_panels(parts: Sequence[QuantizedTensor]) -> Part:
    """Group-quantized matrices dequantized to float32 panels."""
    rows, inputs = parts[0].shape

    def write(part: QuantizedTensor, stride: int, address: int) -> None:
        arrays = [
            one if one is None else np.ascontiguousarray(one)
            for one in (part.values, part.scales, part.minimums)
        ]
        pointers = [one if one is None else one.ctypes.data for one in arrays]
        library().lite_runner_widen(*pointers, *part.shape, part.bits, part.group, stride, address)

    return _in_panels(parts, rows, 4 * PANEL * (-(-inputs // 8) * 8), write)
