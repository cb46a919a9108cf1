"""Layers as the operators read them: one block of bytes each, matrices in panels of 32 outputs.

The fields and their order are those of src/layers.h.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.kernels import library
from lite_runner.kernels.adapters import PANEL, PoolLayout
from lite_runner.kernels.adapters import WORDS as ADAPTER_WORDS
from lite_runner.weights.quantized import QuantizedTensor, quantize

FORMAT = 1  # of the bytes and of what the operators take; up by one whenever either changes
ALIGNMENT = 64  # bytes: a line of the processor's cache
FLOAT32, BFLOAT16, INT8, INT4 = range(4)
ATTENTION, FEED_FORWARD = 1, 2
PLAIN, BYTE_PAIRS, NIBBLE_PAIRS = range(3)  # how inputs follow each other in a word
WORDS_OF_MATRIX = 10
INPUT_GROUP = 32  # inputs that are rounded to int8 with one scale, where the weights have no groups

Floats: TypeAlias = NDArray[np.float32]
Weight: TypeAlias = Floats | QuantizedTensor  # [out, in]
Block: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm where there is a beta."""

    gamma: Floats
    beta: Floats | None
    epsilon: float


def aligned(nbytes: int) -> Block:
    """Room for so many bytes, which begins where the operators read fastest."""
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


class Layout:
    """A block that is laid out: words in front, parts behind them; written only as a whole, so that
    nothing is in memory twice."""

    def __init__(self, words: int) -> None:
        self._words: list[int] = [0] * words
        self._parts: list[tuple[int, _Part]] = []
        self._size = 8 * words

    @property
    def nbytes(self) -> int:
        return -(-self._size // ALIGNMENT) * ALIGNMENT

    def set(self, index: int, *values: int) -> None:
        self._words[index : index + len(values)] = values

    def add(self, part: _Part) -> int:
        """Where the part will be."""
        at = self.nbytes
        self._parts.append((at, part))
        self._size = at + part.nbytes
        return at

    def norm(self, index: int, norm: Norm) -> None:
        beta = 0 if norm.beta is None else self.add(_Copy(norm.beta))
        (epsilon,) = struct.unpack("<q", struct.pack("<d", norm.epsilon))
        self.set(index, int(norm.beta is not None), epsilon, self.add(_Copy(norm.gamma)), beta)

    def adapters(self, index: int, layout: PoolLayout | None) -> None:
        self.set(index, *(layout or PoolLayout(0, ())).words())

    def write(self, target: Block) -> None:
        """Fill `target` [nbytes]."""
        target[: 8 * len(self._words)] = np.array(self._words, "<i8").view(np.uint8)
        for at, part in self._parts:
            part.write(target[at : at + part.nbytes])

    def block(self) -> Block:
        """The bytes."""
        result = aligned(self.nbytes)
        self.write(result)
        return result


class _Copy:
    """An array [n] as it is, zeros behind it up to a multiple."""

    def __init__(self, array: NDArray[Any], multiple: int = 1) -> None:
        self._array = array
        self.nbytes = -(-len(array) // multiple) * multiple * array.itemsize

    def write(self, target: Block) -> None:
        target[: self._array.nbytes] = self._array.view(np.uint8)
        target[self._array.nbytes :] = 0


class _Panels:
    """An array [out, n] in panels [out / 32, n, 32], zeros where out or n are filled up."""

    def __init__(
        self,
        array: NDArray[Any],
        multiple: int = 1,
        *,
        bfloat16: bool = False,
        order: int = PLAIN,
    ) -> None:
        """n is filled up to a multiple; float32 may become bfloat16, integers in a word another
        order."""
        self._array = np.ascontiguousarray(array)
        self._bfloat16, self._order = bfloat16, order
        self._width = -(-array.shape[1] // multiple) * multiple
        size = 2 if bfloat16 else array.itemsize
        self.nbytes = -(-len(array) // PANEL) * PANEL * self._width * size

    def write(self, target: Block) -> None:
        found = library()
        assert found is not None
        rows, width = self._array.shape
        found.lite_runner_pack(
            ctypes.c_void_p(self._array.ctypes.data),
            *(ctypes.c_int64(number) for number in (rows, width, self._width)),
            ctypes.c_int64(self._array.itemsize),
            ctypes.c_int64(2 if self._bfloat16 else self._array.itemsize),
            ctypes.c_int64(self._order),
            ctypes.c_void_p(target.ctypes.data),
        )


_Part: TypeAlias = "Layout | _Copy | _Panels"


def stacked(parts: Sequence[Weight]) -> Weight:
    """Matrices of one input as one, their outputs one after the other."""
    if len(parts) == 1:
        return parts[0]
    quantized = _alike([part for part in parts if isinstance(part, QuantizedTensor)])
    if quantized:
        first, minimums = quantized[0], [part.minimums for part in quantized]
        return QuantizedTensor(
            first.bits,
            first.group,
            np.concatenate([part.values for part in quantized]),
            np.concatenate([part.scales for part in quantized]),
            None if first.minimums is None else np.concatenate(minimums),  # type: ignore[arg-type]
        )
    return np.concatenate(parts)  # type: ignore[arg-type]


def alternating(first: Weight, second: Weight) -> Weight:
    """Two matrices of one shape as one, whose panels are of the first and second in turn."""

    def mixed(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
        pair = np.stack([_padded(one), _padded(other)])
        pair = pair.reshape(2, -1, PANEL, *one.shape[1:]).swapaxes(0, 1)
        result: NDArray[Any] = pair.reshape(-1, *one.shape[1:])
        return result

    if isinstance(first, QuantizedTensor) and isinstance(second, QuantizedTensor):
        first, second = _alike([first, second])
        minimums = None
        if first.minimums is not None and second.minimums is not None:
            minimums = mixed(first.minimums, second.minimums)
        values, scales = mixed(first.values, second.values), mixed(first.scales, second.scales)
        return QuantizedTensor(first.bits, first.group, values, scales, minimums)
    assert not isinstance(first, QuantizedTensor) and not isinstance(second, QuantizedTensor)
    return mixed(first, second)


def _alike(parts: list[QuantizedTensor]) -> list[QuantizedTensor]:
    """Integers with the same groups; a file may hold 8 bits in other groups than were made here."""
    if len({part.group for part in parts}) < 2:
        return parts
    return [quantize(part.float32(), 8, 0) if part.group else part for part in parts]


def _padded(array: NDArray[Any], axis: int = 0, multiple: int = PANEL) -> NDArray[Any]:
    """Zeros behind an axis, up to a multiple."""
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    return np.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])


def _is_bfloat16(weight: Floats) -> bool:
    """Whether bfloat16 holds the same values: then half the bytes have to be read a token."""
    bits = weight.view(np.uint32)
    return not (bits[:1] & 0xFFFF).any() and not any(
        (bits[start : start + 256] & 0xFFFF).any() for start in range(0, len(bits), 256)
    )


def matrix(weight: Weight, bias: Floats | None = None, *, integer_input: bool = False) -> Layout:
    """A matrix in panels; `integer_input`: what one of int8 is multiplied with is rounded too."""
    integer_input = integer_input and isinstance(weight, QuantizedTensor) and weight.bits == 8
    layout = Layout(WORDS_OF_MATRIX)
    out, inputs = weight.shape
    scales = minimums = sums = group = 0
    if isinstance(weight, QuantizedTensor):
        group = weight.group
        words = _padded(weight.values, 1, weight.bits).view(np.uint32)  # of eight inputs
        order = NIBBLE_PAIRS if weight.bits == 4 else PLAIN if integer_input else BYTE_PAIRS
        data = layout.add(_Panels(words, order=order))
        scales = layout.add(_Panels(weight.scales) if group else _Copy(weight.scales, PANEL))
        if weight.minimums is not None:
            minimums = layout.add(_Panels(weight.minimums))
        if integer_input:
            grouped = _padded(weight.values, 1, group or INPUT_GROUP)
            grouped = grouped.reshape(out, -1, group or INPUT_GROUP)
            sums = layout.add(_Panels(grouped.sum(2, dtype=np.int32)))
        kind = INT4 if weight.bits == 4 else INT8
    else:
        bfloat16 = _is_bfloat16(weight)
        kind = BFLOAT16 if bfloat16 else FLOAT32
        data = layout.add(_Panels(weight, 8, bfloat16=bfloat16))
    added = 0 if bias is None else layout.add(_Copy(bias, PANEL))
    layout.set(0, kind, out, inputs, group, int(integer_input), data, scales, minimums, sums, added)
    return layout


def embedding(
    table: Weight,
    positions: Floats | None,
    norm: Norm | None,
    adapters: PoolLayout | None,
    *,
    integer_input: bool,
) -> Layout:
    """`table` [vocab, hidden], which may be the head's matrix too."""
    layout = Layout(8 + ADAPTER_WORDS)
    layout.set(0, table.shape[1], layout.add(matrix(table, integer_input=integer_input)))
    if positions is not None:
        layout.set(2, layout.add(matrix(positions)))
    if norm is not None:
        layout.set(3, 1)
        layout.norm(4, norm)
    layout.adapters(8, adapters)
    return layout


def attention(
    heads: tuple[int, int, int],
    inward: Layout,
    outward: Layout,
    norm: Norm,
    adapters: PoolLayout | None,
    *,
    hidden: int,
    rotary: bool,
    residual: bool,
    slopes: Floats | None,
) -> Layout:
    """`heads`: their number, that of key/value heads, and their size."""
    layout = Layout(14 + ADAPTER_WORDS)
    layout.set(0, ATTENTION, hidden, *heads, int(rotary), int(residual))
    layout.set(7, 0 if slopes is None else layout.add(_Copy(slopes)))
    layout.set(8, layout.add(inward), layout.add(outward))
    layout.norm(10, norm)
    layout.adapters(14, adapters)
    return layout


def feed_forward(
    up: Layout,
    down: Layout,
    norm: Norm,
    adapters: PoolLayout | None,
    *,
    hidden: int,
    wide: int,
    gated: bool,
    residual: bool,
) -> Layout:
    """`up`: gate and up in alternating panels where it is `gated`."""
    layout = Layout(11 + ADAPTER_WORDS)
    layout.set(0, FEED_FORWARD, hidden, wide, int(gated), int(residual))
    layout.set(5, layout.add(up), layout.add(down))
    layout.norm(7, norm)
    layout.adapters(11, adapters)
    return layout


def head(
    matrix_layout: Layout | None, norm: Norm, adapters: PoolLayout | None, *, hidden: int
) -> Layout:
    """Without a matrix the head is that of the embedding."""
    layout = Layout(6 + ADAPTER_WORDS)
    layout.set(0, hidden, 0 if matrix_layout is None else layout.add(matrix_layout))
    layout.norm(2, norm)
    layout.adapters(6, adapters)
    return layout
