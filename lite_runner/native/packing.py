"""Packs layers for the native kernels: one byte block each, matrices in panels of 32 outputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.native import library, structs
from lite_runner.native.block_panels import BlockPanels
from lite_runner.native.lora_pool import PoolLayout
from lite_runner.native.structs import FEWER_BITS, INPUT_GROUP, PANEL, Format, Kind, Order
from lite_runner.records import dataclass
from lite_runner.weights.formats.gguf_blocks import BlockMatrix
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.quantization.quantized import QuantizedTensor, quantize
from lite_runner.weights.tensor import widened

# Format version that introduced each layer kind. The layout of a kind never changes.
_SINCE = {
    Kind.ATTENTION: 1,
    Kind.FEED_FORWARD: 1,
    Kind.EXTENDED_ATTENTION: 2,
    Kind.GENERAL_ATTENTION: 3,
    Kind.GENERAL_FEED_FORWARD: 3,
    Kind.EXPERTS: 3,
}
_SINCE_BLOCKS = 5  # that introduced matrices of GGUF's blocks
_SINCE_BFLOAT16_INPUT = 6
UNREADABLE = (4,)  # had them with their words in another order
FORMAT = _SINCE_BFLOAT16_INPUT  # newest version; the kernels read older ones too
ALIGNMENT = 64  # bytes: a cache line

Floats: TypeAlias = NDArray[np.float32]
# [out, in]; floats as stored, see LazyTensor
Weight: TypeAlias = NDArray[Any] | QuantizedTensor | BlockMatrix
Block: TypeAlias = NDArray[np.uint8]
Room: TypeAlias = Callable[[int], Block]  # gives that many bytes: zeros that start at a cache line


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm if beta is given."""

    gamma: Floats
    beta: Floats | None
    epsilon: float


def aligned(nbytes: int) -> Block:
    """A new Room."""
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)  # zeroed: padding may be written to a file
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


class Layout:
    """Layout of a block: a struct followed by its parts. Only the whole block is written, so no
    part is copied twice."""

    def __init__(self, fields: ctypes.Structure) -> None:
        """`fields`: the struct; offsets may be set until the block is written."""
        self._fields = fields
        self._parts: list[tuple[int, _Part]] = []
        self._size = ctypes.sizeof(fields)
        self.since = 1  # format version that introduced its matrices

    @property
    def nbytes(self) -> int:
        return -(-self._size // ALIGNMENT) * ALIGNMENT

    def add(self, part: _Part) -> int:
        """Append a part; its offset."""
        at = self.nbytes
        self._parts.append((at, part))
        self._size = at + part.nbytes
        if isinstance(part, Layout):
            self.since = max(self.since, part.since)
        return at

    def norm(self, norm: Norm) -> structs.Norm:
        """The struct of a norm, whose values are appended as parts."""
        fields = structs.Norm(centred=norm.beta is not None, epsilon=norm.epsilon)
        if norm.beta is not None:
            fields.beta = self.add(_Copy(norm.beta))
        fields.gamma = self.add(_Copy(norm.gamma))
        return fields

    def write(self, target: Block) -> None:
        """Fill `target` [nbytes]."""
        fields = bytes(self._fields)
        target[: len(fields)] = np.frombuffer(fields, np.uint8)
        for at, part in self._parts:
            part.write(target[at : at + part.nbytes])

    def block(self, room: Room = aligned) -> Block:
        """The packed bytes, in a `room`."""
        result = room(self.nbytes)
        self.write(result)
        return result


class _Copy:
    """An array [n], copied unchanged."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self.nbytes = array.nbytes

    def write(self, target: Block) -> None:
        target[:] = self._array.view(np.uint8)


class _Panels:
    """Arrays [out, n] of one shape as panels [out / 32, n, 32], interleaved if there are two;
    zero-padded."""

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],
        multiple: int = 1,
        *,
        bfloat16: bool = False,
        order: Order = Order.PLAIN,
    ) -> None:
        """n is padded to a `multiple`; float32 may be stored as bfloat16 if that is exact; `order`:
        order of the integers in a word."""
        self._arrays = [np.ascontiguousarray(array) for array in arrays]
        self._bfloat16, self._order = bfloat16, order
        rows, width = arrays[0].shape
        self._width = -(-width // multiple) * multiple
        self._size = 2 if bfloat16 else arrays[0].itemsize
        self._panel = PANEL * self._width * self._size
        self.nbytes = len(arrays) * -(-rows // PANEL) * self._panel

    def write(self, target: Block) -> None:
        found = library()
        for index, array in enumerate(self._arrays):
            rows, width = array.shape
            found.lite_runner_pack(
                ctypes.c_void_p(array.ctypes.data),
                *(ctypes.c_int64(number) for number in (rows, width, self._width)),
                *(ctypes.c_int64(number) for number in (array.itemsize, self._size, self._order)),
                ctypes.c_int64(len(self._arrays)),
                ctypes.c_void_p(target.ctypes.data + index * self._panel),
            )
            drop_pages(array)  # a mapped file's pages are not read again


class _Dequantized:
    """Group-quantized matrices dequantized to float32 panels: see _Panels."""

    def __init__(self, parts: Sequence[QuantizedTensor]) -> None:
        self._parts = parts
        rows, inputs = parts[0].shape
        self._panel = 4 * PANEL * (-(-inputs // 8) * 8)
        self.nbytes = len(parts) * -(-rows // PANEL) * self._panel

    def write(self, target: Block) -> None:
        found = library()
        for index, part in enumerate(self._parts):
            arrays = [np.ascontiguousarray(part.values), np.ascontiguousarray(part.scales)]
            if part.minimums is not None:
                arrays.append(np.ascontiguousarray(part.minimums))
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
            pointers += [ctypes.c_void_p(None)] * (3 - len(pointers))
            numbers = (*part.shape, part.bits, part.group, len(self._parts))
            found.lite_runner_widen(
                *pointers,
                *(ctypes.c_int64(number) for number in numbers),
                ctypes.c_void_p(target.ctypes.data + index * self._panel),
            )


_Part: TypeAlias = "BlockPanels | _Dequantized | Layout | _Copy | _Panels"


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
    first, minimums = quantized[0], [part.minimums for part in quantized]
    return QuantizedTensor(
        first.bits,
        first.group,
        np.concatenate([part.values for part in quantized]),
        np.concatenate([part.scales for part in quantized]),
        None if first.minimums is None else np.concatenate(minimums),  # type: ignore[arg-type]
    )


def alike(matrices: Sequence[Weight]) -> Sequence[Weight]:
    """The matrices in forms whose inputs are rounded alike: all in blocks, all quantized with the
    same groups, or all floats."""
    types = {one.type_name if isinstance(one, BlockMatrix) else "" for one in matrices}
    if "" not in types and len({Format[one] in FEWER_BITS for one in types}) == 1:
        return matrices
    quantized, floats = _alike(matrices)
    return quantized or floats


@dataclass(frozen=True)
class Alternating:
    """Two matrices of one shape with interleaved panels."""

    first: Weight
    second: Weight


@dataclass(frozen=True)
class Stacked:
    """Matrices with the same input one after the other, of which some are in GGUF's blocks."""

    parts: tuple[Weight, ...]


def _one_type(parts: Sequence[Weight]) -> bool:
    """Whether all are in GGUF's blocks of one type."""
    types = {part.type_name if isinstance(part, BlockMatrix) else "" for part in parts}
    return len(types) == 1 and "" not in types


def _alike(parts: Sequence[Weight]) -> tuple[list[QuantizedTensor], list[NDArray[Any]]]:
    """Bring matrices that are packed together to one form: all quantized with the same groups, or
    all floats of one type."""
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(quantized) < len(parts) or len({part.bits for part in quantized}) > 1:
        floats = [part if isinstance(part, np.ndarray) else part.float32() for part in parts]
        one_type = len({part.dtype for part in floats}) == 1
        return [], floats if one_type else [widened(part) for part in floats]
    if len({part.group for part in quantized}) > 1:
        # Some have a file's own 8-bit groups, others were quantized per row.
        quantized = [quantize(one.float32(), 8, 0) if one.group else one for one in quantized]
    return quantized, []


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


def matrix(
    weight: Weight | Alternating | Stacked,
    bias: Floats | tuple[Floats, Floats] | None = None,
    *,
    rounded_input: bool = False,
    dequantize: bool = False,
) -> Layout:
    """Pack a matrix in panels with its bias [out] (a pair for Alternating).

    `rounded_input`: the input of an int8 matrix, or of blocks, is quantized to int8 too, and that
    of a matrix in bfloat16 is rounded to bfloat16;
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
    layout = Layout(fields)
    if blocks:
        fields.format, fields.rounded_input = Format[blocks[0].type_name], rounded_input
        fields.data = layout.add(BlockPanels(blocks))
        layout.since = _SINCE_BLOCKS
        _add_bias(layout, fields, bias)
        return layout
    quantized, floats = _alike(parts)
    if quantized and dequantize:
        fields.format = Format.FLOAT32
        fields.data = layout.add(_Dequantized(quantized))
    elif quantized:
        _add_integers(layout, fields, quantized, rounded_input and quantized[0].bits == 8)
    else:
        fields.format = _format(floats)
        bfloat16 = fields.format == Format.BFLOAT16
        fields.data = layout.add(_Panels(floats, 8, bfloat16=bfloat16))
        if bfloat16 and rounded_input:
            fields.rounded_input = True
            layout.since = _SINCE_BFLOAT16_INPUT
    _add_bias(layout, fields, bias)
    return layout


def _joined(
    parts: Sequence[Weight],
    bias: Floats | tuple[Floats, Floats] | None,
    *,
    rounded_input: bool,
    by_turns: bool,
) -> Layout:
    """Matrices of different forms as one, each packed by itself."""
    whole = structs.JoinedMatrix(count=len(parts), by_turns=by_turns)
    fields = whole.plain
    fields.format, fields.rounded_input = Format.JOINED, rounded_input
    fields.inputs = parts[0].shape[1]
    rows = [part.shape[0] for part in parts]
    fields.out = sum(-(-one // PANEL) * PANEL for one in rows) if by_turns else sum(rows)
    layout = Layout(whole)
    for index, part in enumerate(parts):
        rounded = rounded_input and isinstance(part, BlockMatrix)
        whole.parts[index] = layout.add(matrix(part, rounded_input=rounded))
    _add_bias(layout, fields, bias)
    return layout


def _add_bias(
    layout: Layout, fields: structs.Matrix, bias: Floats | tuple[Floats, Floats] | None
) -> None:
    if bias is not None:
        biases = bias if isinstance(bias, tuple) else (bias,)
        fields.bias = layout.add(_Panels([one[:, None] for one in biases]))


def _add_integers(
    layout: Layout, fields: structs.Matrix, parts: list[QuantizedTensor], rounded_input: bool
) -> None:
    """Add the quantized values and their scales."""
    bits, group = parts[0].bits, parts[0].group
    fields.format = Format.INT4 if bits == 4 else Format.INT8
    fields.group, fields.rounded_input = group, rounded_input
    order = Order.NIBBLE_PAIRS if bits == 4 else Order.PLAIN if rounded_input else Order.BYTE_PAIRS
    # Eight inputs at a time.
    words = [_padded(part.values, 1, bits).view(np.uint32) for part in parts]
    fields.data = layout.add(_Panels(words, order=order))
    if group:
        fields.scales = layout.add(_Panels([part.scales for part in parts]))
    else:
        fields.scales = layout.add(_Panels([part.scales[:, None] for part in parts]))
    if bits == 4:
        fields.minimums = layout.add(
            _Panels([part.minimums for part in parts if part.minimums is not None])
        )
    if rounded_input:
        span = group or INPUT_GROUP
        grouped = [_padded(part.values, 1, span) for part in parts]
        totals = [one.reshape(len(one), -1, span).sum(2, dtype=np.int32) for one in grouped]
        fields.sums = layout.add(_Panels(totals))


def embedding(
    table: Layout,
    positions: Floats | None,
    norm: Norm | None,
    adapters: PoolLayout | None,
    *,
    hidden: int,
) -> Layout:
    """`table`: a matrix [vocab, hidden], which a tied head reads too."""
    fields = structs.EmbeddingLayer(hidden=hidden, adapters=_parts_of(adapters))
    layout = Layout(fields)
    fields.table = layout.add(table)
    if positions is not None:
        fields.positions = layout.add(matrix(positions))
    if norm is not None:
        fields.has_norm = True
        fields.norm = layout.norm(norm)
    return layout


@dataclass(frozen=True)
class Residual:
    """How a layer's output is added to its input: x + scale * norm(output); with `normed` to that
    times the normed input. `parallel`: a feed-forward layer takes the input of the attention layer
    before it, but adds to that one's output."""

    scale: float
    norm: Norm | None
    normed: float | None = None
    parallel: bool = False


@dataclass(frozen=True)
class GeneralAttention:
    """What only a general attention layer has."""

    scale: float  # of scores
    residual: Residual
    joint_norm: bool = False  # query and key norm over all heads together
    softcap: float | None = None  # of scores
    rope: tuple[int, int] = (0, 0)  # numbers in a row of the rotary table; this layer's first
    prefix: bool = False  # a step says which key is the last that each token sees


@dataclass(frozen=True)
class GeneralFeedForward:
    """What only a general feed-forward layer has."""

    residual: Residual
    activation: structs.Activation


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and flags of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    rotary: bool
    residual: bool
    window: int | None = None  # sliding window in tokens, the current one included; None: full


def attention(
    shape: AttentionShape,
    inward: Layout,
    outward: Layout,
    norm: Norm | None,
    adapters: PoolLayout | None,
    *,
    slopes: Floats | None = None,
    qk_norm: tuple[Norm | None, Norm | None] = (None, None),
    general: GeneralAttention | None = None,
) -> Layout:
    """Pack an attention layer; `inward` is the fused qkv projection, `outward` the output one.

    `slopes`: ALiBi's [heads]. `qk_norm`: of queries and of keys, before RoPE; their gamma is
    [head_dim] for each head, or that of all heads together if `general` says so. `norm` None: only
    with `general`.
    """
    window = shape.window
    assert window is None or window > 0
    widest = structs.GeneralAttentionLayer()
    whole = widest.extended
    whole.window = window or 0
    extended = any(qk_norm) or window is not None
    fields = whole.plain
    fields.kind = Kind.EXTENDED_ATTENTION if extended else Kind.ATTENTION
    if general is not None:
        fields.kind = Kind.GENERAL_ATTENTION
        widest.scale, widest.residual_scale = general.scale, general.residual.scale
        widest.joint_norm, widest.softcap = general.joint_norm, general.softcap or 0.0
        widest.rope_width, widest.rope_offset = general.rope
        widest.normed_residual = general.residual.normed or 0.0
        widest.prefix, widest.parallel = general.prefix, general.residual.parallel
    fields.hidden = shape.hidden
    fields.heads, fields.kv_heads, fields.head_dim = shape.heads, shape.kv_heads, shape.head_dim
    fields.rotary, fields.residual = shape.rotary, shape.residual
    fields.adapters = _parts_of(adapters)
    layout = Layout(widest if general is not None else whole if extended else fields)
    if slopes is not None:
        fields.slopes = layout.add(_Copy(slopes))
    fields.query_key_value = layout.add(inward)
    fields.projection = layout.add(outward)
    if norm is not None:
        fields.norm = layout.norm(norm)
    query_norm, key_norm = qk_norm
    if query_norm is not None:
        whole.query_norm = layout.norm(query_norm)
    if key_norm is not None:
        whole.key_norm = layout.norm(key_norm)
    if general is not None and general.residual.norm is not None:
        widest.post_norm = layout.norm(general.residual.norm)
    return layout


def feed_forward(
    up: Layout,
    down: Layout,
    norm: Norm | None,
    adapters: PoolLayout | None,
    *,
    hidden: int,
    wide: int,
    gated: bool,
    residual: bool | GeneralFeedForward,
) -> Layout:
    """Pack a feed-forward layer; `up`: gate and up as Alternating panels if `gated`. `norm` None:
    only in a general layer."""
    whole = structs.GeneralFeedForwardLayer()
    general = residual if isinstance(residual, GeneralFeedForward) else None
    fields = whole.plain
    fields.kind = Kind.FEED_FORWARD if general is None else Kind.GENERAL_FEED_FORWARD
    fields.hidden, fields.wide, fields.gated = hidden, wide, gated
    fields.residual = bool(residual)
    fields.adapters = _parts_of(adapters)
    layout = Layout(fields if general is None else whole)
    fields.up = layout.add(up)
    fields.down = layout.add(down)
    if norm is not None:
        fields.norm = layout.norm(norm)
    if general is not None:
        whole.activation, whole.parallel = general.activation, general.residual.parallel
        whole.residual_scale = general.residual.scale
        whole.normed_residual = general.residual.normed or 0.0
        if general.residual.norm is not None:
            whole.post_norm = layout.norm(general.residual.norm)
    return layout


@dataclass(frozen=True)
class Routing:
    """How a layer's tokens go to its experts."""

    router: Layout  # matrix [experts, hidden]
    chosen: int  # experts of a token
    renormalized: bool


def experts(
    routing: Routing,
    ups: Sequence[Layout],
    downs: Sequence[Layout],
    norm: Norm | None,
    *,
    hidden: int,
    wide: int,
    general: GeneralFeedForward,
) -> Layout:
    """Pack a mixture of experts `wide` each; `ups`: gate and up of each as Alternating panels."""
    whole = structs.ExpertsLayer(
        experts=len(ups), chosen=routing.chosen, renormalized=routing.renormalized
    )
    fields = whole.general.plain
    fields.kind = Kind.EXPERTS
    fields.hidden, fields.wide, fields.gated, fields.residual = hidden, wide, True, True
    fields.adapters = _parts_of(None)
    layout = Layout(whole)
    whole.router = layout.add(routing.router)
    fields.up = layout.add(_Copy(np.array([layout.add(one) for one in ups], np.int64)))
    fields.down = layout.add(_Copy(np.array([layout.add(one) for one in downs], np.int64)))
    if norm is not None:
        fields.norm = layout.norm(norm)
    whole.general.activation = general.activation
    whole.general.residual_scale = general.residual.scale
    whole.general.normed_residual = general.residual.normed or 0.0
    if general.residual.norm is not None:
        whole.general.post_norm = layout.norm(general.residual.norm)
    return layout


def head(
    matrix_layout: Layout | None,
    norm: Norm,
    adapters: PoolLayout | None,
    *,
    hidden: int,
    softcap: float | None = None,
) -> Layout:
    """Pack the head; None: it is tied to the embedding."""
    whole = structs.CappedHeadLayer(softcap=softcap or 0.0)
    fields = whole.plain
    fields.hidden, fields.adapters = hidden, _parts_of(adapters)
    layout = Layout(fields if softcap is None else whole)
    if matrix_layout is not None:
        fields.matrix_offset = layout.add(matrix_layout)
    fields.norm = layout.norm(norm)
    return layout


def format_of(blocks: Iterable[Block]) -> int:
    """The oldest format version that supports these attention and feed-forward layers."""
    kinds = {Kind(int.from_bytes(block[:8].tobytes(), "little")) for block in blocks}
    return max(_SINCE[kind] for kind in kinds)


def _parts_of(adapters: PoolLayout | None) -> structs.LoraPair:
    """None: no adapter targets the layer."""
    return (adapters or PoolLayout(0, ())).parts()
