"""GGUF's blocks: as they are, as floats, and the integers of the simplest ones without a float in
between.

A block holds 32 values of a row: float16 scale d, in Q4_1 also a float16 minimum m, and the
integers. Q8_0: d * q, q int8. Q4_0: d * (q - 8), Q4_1: d * q + m, q two a byte: value i in the low
nibble of byte i, value i + 16 in the high one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.quantization import Scheme
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights import drop_pages
from lite_runner.weights.quantization.quantized import (
    E2M1,
    QuantizedTensor,
    packed,
    powers_of_two,
    unpacked,
)

GROUP = 32  # values of a block
SCHEMES = {"Q8_0": Scheme(8, GROUP), "Q4_0": Scheme(4, GROUP), "Q4_1": Scheme(4, GROUP)}
BLOCKS_AT_ONCE = 1 << 14
# Types whose values are entries of a small table times a scale shared by `group` values: the
# table, the group, and the bits of a value in the file.
_GRID_1 = [one + delta for one in (-1, 0, 1) for delta in (-0.125, 0.125)]
_GRID_2 = [sign * one for one in (0x08, 0x19, 0x2B) for sign in (-1, 1)]
_GRID_3 = [sign * one for one in (4, 12, 20, 28, 36, 44, 52, 62) for sign in (-1, 1)]
_ODD = [*range(-15, 16, 2)]
INDEXED: dict[str, tuple[Sequence[float], int, int]] = {
    **{"IQ1_S": (_GRID_1, 32, 1), "IQ1_M": (_GRID_1, 16, 1)},
    **{"IQ2_XXS": (_GRID_2, 32, 2), "IQ2_XS": (_GRID_2, 16, 2), "IQ2_S": (_GRID_2, 16, 2)},
    **{"IQ3_XXS": (_GRID_3, 32, 3), "IQ3_S": (_ODD, 32, 3)},
    **{"TQ1_0": ([-1, 0, 1], 256, 2), "TQ2_0": ([-1, 0, 1, 2], 256, 2)},
    "NVFP4": ([float(2 * one) for one in E2M1], 16, 0),
}
_FINEST = 8  # the entries are multiples of its inverse
VALUES_AT_ONCE = 1 << 18  # dequantized at a time; a working set that stays in the L2 cache
_HEAD_BYTES = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}


@dataclass(frozen=True, eq=False)
class BlockMatrix:
    """A matrix [out, in] in GGUF's blocks, which run along its rows."""

    type_name: str  # such as Q4_K
    data: NDArray[np.uint8]  # [out, bytes of a row], maybe a view of the file
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        return len(self.data), self.columns

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def with_rows(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> BlockMatrix:
        """`change` moves rows or takes some of them."""
        return replace(self, data=np.ascontiguousarray(change(self.data)))

    def with_columns(self, start: int, stop: int) -> BlockMatrix:
        """A slice of columns, in whole blocks."""
        columns = stop - start
        first, last = (self.data.shape[1] * at // self.columns for at in (start, stop))
        return replace(self, data=np.ascontiguousarray(self.data[:, first:last]), columns=columns)

    def float32(self) -> NDArray[np.float32]:
        """The dequantized values [rows, columns]."""
        return dequantize(self.data.reshape(-1), self.type_name).reshape(self.shape)


def block_columns(type_name: str) -> int:
    """Values of a block."""
    return 256 if type_name.endswith(("_K", "_XS")) else GROUP


def dequantize(data: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """Blocks as float32 [values]; the gguf library's result, bit for bit.

    The library works on 16 rows at a time and joins the results; larger pieces written straight
    to their place are about three times as fast.
    """
    from gguf import quants

    kind = getattr(quants, type_name)
    kind.init_grid()
    blocks = data.reshape(-1, kind.type_size)
    result = np.empty((len(blocks), kind.block_size), np.float32)
    step = VALUES_AT_ONCE // kind.block_size
    for i in range(0, len(blocks), step):
        result[i : i + step] = kind.dequantize_blocks(blocks[i : i + step])
    drop_pages(data)
    return result.reshape(-1)


def integers_of(
    data: NDArray[np.uint8], type_name: str, rows: int, columns: int
) -> QuantizedTensor:
    """The matrix [rows, columns] in blocks of one of SCHEMES; its values are the blocks' own.

    Raises ArtifactError for values that no quantizer writes and that integers of ours do not hold.
    """
    scheme, head = SCHEMES[type_name], _HEAD_BYTES[type_name]
    count = rows * columns // GROUP
    body = GROUP * scheme.bits // 8
    blocks = data.reshape(count, head + body)
    heads = np.ascontiguousarray(blocks[:, :head]).view("<f2").astype(np.float16, copy=False)
    scales = np.ascontiguousarray(heads[:, 0]).reshape(rows, -1)
    minimums = None
    if type_name == "Q4_1":
        minimums = np.ascontiguousarray(heads[:, 1]).reshape(rows, -1)
    elif type_name == "Q4_0":
        with np.errstate(over="ignore"):
            minimums = scales * np.float16(-8)  # exact: only the exponent changes
    values: NDArray[Any] = np.empty((count, body), np.int8 if scheme.bits == 8 else np.uint8)
    for start in range(0, count, BLOCKS_AT_ONCE):
        part = slice(start, start + BLOCKS_AT_ONCE)
        stored = np.ascontiguousarray(blocks[part, head:])
        values[part] = stored.view(np.int8) if scheme.bits == 8 else _neighbours(stored)
    drop_pages(data)
    matrix = QuantizedTensor(scheme.bits, GROUP, values.reshape(rows, -1), scales, minimums)
    if not matrix.sound:
        raise ArtifactError(
            f"a matrix [{rows}, {columns}] of {type_name} blocks: a scale that is not finite, or"
            " an integer of -128, which no quantizer writes",
            "the file may be damaged; quant=none takes it as it is",
        )
    return matrix


def mxfp4(data: NDArray[np.uint8], rows: int, columns: int) -> QuantizedTensor:
    """The matrix [rows, columns] in blocks of MXFP4: the exponent of a power of 2, and floats of 4
    bits in the order of Q4_0. Raises ArtifactError for an exponent that stands for no number."""
    blocks = data.reshape(rows, -1, 17)
    exponents = blocks[:, :, 0]
    if (exponents == 255).any():
        raise ArtifactError(
            f"a matrix [{rows}, {columns}] of MXFP4 blocks: a scale that is not a number",
            "the file may be damaged",
        )
    values: NDArray[Any] = np.empty((rows, columns // 2), np.uint8)
    step = max(1, VALUES_AT_ONCE // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        stored = np.ascontiguousarray(blocks[part, :, 1:]).reshape(-1, 16)
        values[part] = _neighbours(stored).reshape(-1, columns // 2)
    scales = powers_of_two(exponents)
    drop_pages(data)
    return QuantizedTensor(4, GROUP, values, scales, None, table=E2M1)


def indices(data: NDArray[np.uint8], type_name: str, rows: int, columns: int) -> QuantizedTensor:
    """The matrix [rows, columns] in blocks of one of INDEXED: indices of 4 bits into its numbers,
    whose products with the scales are exact. Raises ArtifactError for non-finite scales."""
    numbers, group, _ = INDEXED[type_name]
    table = np.zeros(16, np.float32)
    table[: len(numbers)] = numbers
    index_of = np.zeros(1 << 10, np.uint8)
    index_of[(table[: len(numbers)] * _FINEST).astype(np.int16)] = np.arange(len(numbers))
    stored = data.reshape(rows, -1)
    values = np.empty((rows, columns // 2), np.uint8)
    scales = np.empty((rows, columns // group), np.float32)
    step = max(1, VALUES_AT_ONCE // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        some = np.ascontiguousarray(stored[part])
        scales[part] = _scales(some, type_name).reshape(len(some), -1)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            multiples = dequantize(some.reshape(-1), type_name).reshape(-1, group)
            multiples /= scales[part].reshape(-1, 1) / np.float32(_FINEST)
        zero = ~np.isfinite(multiples)  # a scale of 0, so the values are 0 too
        multiples[zero] = 0
        values[part] = packed(index_of[multiples.astype(np.int16)].reshape(len(some), -1))
    if not np.isfinite(scales).all():
        raise ArtifactError(
            f"a matrix [{rows}, {columns}] of {type_name} blocks: a scale that is not a number",
            "the file may be damaged",
        )
    drop_pages(data)
    return QuantizedTensor(4, group, values, scales, None, table=table)


def _scales(rows: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """The scale of each group, in the order of the blocks of INDEXED types."""
    from gguf import quants

    kind = getattr(quants, type_name)
    blocks = rows.reshape(-1, kind.type_size)
    if type_name == "NVFP4":
        found: NDArray[np.float32] = kind.ue4m3_to_fp32(blocks[:, :4]).astype(np.float32)
        return found
    steps: NDArray[Any]
    if type_name == "IQ1_M":  # the block's scale lies in the upper bits of the others
        words = blocks[:, 48:].copy().view("<u2")
        pieces = words >> 12 << np.arange(0, 16, 4, np.uint16)
        whole = np.bitwise_or.reduce(pieces, axis=1).astype(np.uint16).view(np.float16)
        steps = words[:, :, None] >> np.arange(0, 12, 3, np.uint16) & 7
        return _times(whole, 2 * steps.reshape(len(blocks), -1) + 1)
    ends = type_name.startswith("TQ")
    d = (blocks[:, -2:] if ends else blocks[:, :2]).copy().view(np.float16)[:, 0]
    if ends:
        return _times(d, np.ones((len(blocks), 1)))
    if type_name == "IQ1_S":
        return _times(d, 2 * (blocks[:, 34:].copy().view("<u2") >> 12 & 7) + 1)
    if type_name in ("IQ2_XXS", "IQ3_XXS"):
        words = (blocks[:, 2:] if type_name == "IQ2_XXS" else blocks[:, 66:]).copy().view("<u4")
        steps = (words[:, 1::2] if type_name == "IQ2_XXS" else words) >> 28
    else:
        nibbles = blocks[:, 106:] if type_name == "IQ3_S" else blocks[:, -8:]
        steps = unpacked(np.ascontiguousarray(nibbles))
    factor = {"IQ3_S": 2.0, "IQ3_XXS": 0.5}.get(type_name, 0.25)
    return _times(d, (0.5 + steps) * factor)


def _times(d: NDArray[np.float16], steps: NDArray[Any]) -> NDArray[np.float32]:
    return d.astype(np.float32)[:, None] * steps.astype(np.float32)


def _neighbours(stored: NDArray[np.uint8]) -> NDArray[Any]:
    """Nibbles [n, 16] in GGUF's order as bytes of two neighbours, the even one low."""
    pairs = stored.view("<u2")  # bytes 2i and 2i + 1, of the values 2i, 2i + 1, and 16 more each
    low = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
    high = (pairs >> 4 & 0x0F) | (pairs >> 8 & 0xF0)
    return np.concatenate([low.astype(np.uint8), high.astype(np.uint8)], axis=1)
