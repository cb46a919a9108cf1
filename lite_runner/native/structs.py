"""Packed layers: ctypes mirrors of the structs in src/layers.h, and the pools of their adapters.

Offsets are in bytes from the start of the struct; 0: the part is absent. A layer's pool has a row
per adapter slot, which holds A [rank, in] and B [out / 32, rank, 32] of each targeted matrix of the
layer; the scale is folded into B, and ranks and outputs are zero-padded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure, c_double, c_int64
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import by_role, spec
from lite_runner.architectures.naming import HEAD, Role
from lite_runner.architectures.spec import Decoder
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from lite_runner.weights.lora.adapter import Adapter, LoraSize

PANEL = 32  # adjacent outputs
INPUT_GROUP = 32  # inputs that share an int8 scale where the weights have no groups
MOST_MATRICES = 4  # per layer
MOST_PARTS = 3  # of a joined matrix
MOST_HEAD_DIM = 1024
MOST_GROUP = 256  # whose 16 by 8 bit products sum up in 32 bits


class Format(IntEnum):
    """Storage format of a matrix."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    FLOAT16 = 4
    FLOAT8 = 5  # e4m3
    TABLE4 = 6  # indices of 4 bits
    JOINED = 7  # a JoinedMatrix
    Q4_0 = 8  # from here on GGUF's blocks
    Q4_1 = 9
    Q5_0 = 10
    Q5_1 = 11
    Q8_0 = 12
    Q4_K = 13
    Q5_K = 14
    Q6_K = 15
    IQ4_NL = 16
    IQ4_XS = 17
    Q2_K = 18
    Q3_K = 19


# Of GGUF's blocks: inputs of a unit, and its bytes for a panel: see BlockForm in src/layers.h.
UNITS = {
    Format.Q4_0: (32, 576),
    Format.Q4_1: (32, 640),
    Format.Q5_0: (32, 704),
    Format.Q5_1: (32, 768),
    Format.Q8_0: (32, 1088),
    Format.Q4_K: (256, 4736),
    Format.Q5_K: (256, 5760),
    Format.Q6_K: (256, 6720),
    Format.IQ4_NL: (32, 576),
    Format.IQ4_XS: (256, 4416),
    Format.Q2_K: (256, 2688),
    Format.Q3_K: (256, 3648),
}


# The inputs of these are rounded to 15 bits, not 16: their scales are of 8 bits.
FEWER_BITS = (Format.Q6_K, Format.IQ4_XS)


class ScaleType(IntEnum):
    """Storage type of the scales of groups."""

    HALF = 0
    FLOAT32 = 1
    BFLOAT16 = 2


class Order(IntEnum):
    """Order of the inputs in a word."""

    PLAIN = 0
    BYTE_PAIRS = 1
    NIBBLE_PAIRS = 2


class Kind(IntEnum):
    """Layer kind, the first word of its block."""

    ATTENTION = 1
    FEED_FORWARD = 2
    EXPERTS = 3
    RECURRENT = 4
    NONE = 5
    JOIN = 6


class Activation(IntEnum):
    """Activation of a feed-forward network."""

    SILU = 0
    GELU = 1
    GELU_EXACT = 2
    QUICK_GELU = 3
    RELU = 4
    RELU_SQUARED = 5


def _integers(names: str) -> list[tuple[str, type[c_int64]]]:
    """Fields of 64 bits."""
    return [(name, c_int64) for name in names.split()]


# With slots, assigning a misspelled field fails.
class Matrix(Structure):
    """A matrix [out, in]; `format` is a Format."""

    __slots__ = ()
    _fields_ = [
        *_integers("format out inputs group rounded_input data scales minimums sums bias"),
        *_integers("scale_type zero zeros order table"),
    ]


class JoinedMatrix(Structure):
    """Matrices with the same inputs whose panels follow each other, or alternate; the offsets of
    the parts are from this struct."""

    __slots__ = ()
    _fields_ = [("plain", Matrix), *_integers("count by_turns"), ("parts", c_int64 * MOST_PARTS)]


class Norm(Structure):
    """LayerNorm if centred, else RMSNorm; offsets from the start of the layer."""

    __slots__ = ()
    _fields_ = [("centred", c_int64), ("epsilon", c_double), *_integers("gamma beta")]


class LoraPair(Structure):
    """Offsets, in elements, of A (`down`) and B (`up`) of each matrix in an adapter slot; -1: not
    targeted."""

    __slots__ = ()
    _fields_ = [
        ("rank", c_int64),
        ("down", c_int64 * MOST_MATRICES),
        ("up", c_int64 * MOST_MATRICES),
    ]


class EmbeddingLayer(Structure):
    """Token embedding."""

    __slots__ = ()
    _fields_ = [
        *_integers("hidden table positions side side_layers side_table side_inward"),
        ("table_scale", c_double),
        ("side_scale", c_double),
        ("norm", Norm),
        ("side_norm", Norm),
        ("adapters", LoraPair),
    ]


class Residual(Structure):
    """The residual connection of a layer: sum_norm(x + scale * norm(output)); with `normed_input`
    to that times the normed input."""

    __slots__ = ()
    _fields_ = [("norm", Norm), ("scale", c_double), ("normed_input", c_double), ("sum_norm", Norm)]


class AttentionLayer(Structure):
    """Norm, attention and output projection."""

    __slots__ = ()
    _fields_ = [
        *_integers("kind hidden heads kv_heads head_dim rotary rope_width rope_offset"),
        *_integers("slopes window chunk temperatures span prefix parallel"),
        *_integers("joint_norm apart_norm late_norm sinks placed_queries gated borrowed"),
        *_integers("latent latent_width latent_value query_rank places absorb expand query"),
        ("latent_norm", Norm),
        ("latent_query_norm", Norm),
        ("scale", c_double),
        ("softcap", c_double),
        ("clip", c_double),
        *_integers("query_key_value projection"),
        ("norm", Norm),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("value_norm", Norm),
        ("residual", Residual),
        ("adapters", LoraPair),
    ]


class RecurrentLayer(Structure):
    """Norm, a mixer with a state in place of keys, and output projection."""

    __slots__ = ()
    _fields_ = [
        *_integers("kind hidden heads key_heads key_dim value_dim kernel delta groups"),
        *_integers("inward rates projection taps taps_bias decay rate_bias skip"),
        ("norm", Norm),
        ("out_norm", Norm),
        ("residual", Residual),
        ("adapters", LoraPair),
    ]


class Side(Structure):
    """Per-layer inputs of a token, added after the feed-forward network."""

    __slots__ = ()
    _fields_ = [
        *_integers("width layer layers gate down"),
        ("gate_scale", c_double),
        ("factor", c_double),
        ("residual", Residual),
    ]


class FeedForwardLayer(Structure):
    """Norm and feed-forward network. Of a mixture of experts `up` and `down` are int64 [experts]:
    offsets of each one's matrices."""

    __slots__ = ()
    _fields_ = [
        *_integers("kind hidden wide gated activation parallel up down"),
        *_integers("experts chosen renormalized sigmoid choice_bias"),
        *_integers("groups chosen_groups best_of_group router"),
        *_integers("shared shared_up shared_down shared_gate scaled_inputs expert_scales"),
        ("scale", c_double),
        ("limit", c_double),
        ("norm", Norm),
        ("expert_norm", Norm),
        ("expert_out_norm", Norm),
        ("shared_norm", Norm),
        ("shared_out_norm", Norm),
        ("side", Side),
        ("residual", Residual),
        ("adapters", LoraPair),
    ]


class HeadLayer(Structure):
    """Final norm and output head."""

    __slots__ = ()
    _fields_ = [*_integers("hidden matrix_offset"), ("norm", Norm), ("adapters", LoraPair)]


ALIGNMENT = 64  # bytes: a cache line

Floats: TypeAlias = NDArray[np.float32]
Block: TypeAlias = NDArray[np.uint8]
Room: TypeAlias = Callable[[int], Block]  # gives that many bytes: zeros that start at a cache line


def aligned(nbytes: int) -> Block:
    """A new Room."""
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)  # zeroed: padding may be written to a file
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


@dataclass(frozen=True)
class Part:
    """A part of a block; `write` fills its bytes."""

    nbytes: int
    write: Callable[[Block], None]


def copied(array: NDArray[Any]) -> Part:
    """An array [n], copied."""

    def write(target: Block) -> None:
        target[:] = array.view(np.uint8)

    return Part(array.nbytes, write)


@dataclass(frozen=True)
class NormValues:
    """RMSNorm, or LayerNorm if beta is given."""

    gamma: Floats
    beta: Floats | None
    epsilon: float


class StructLayout:
    """Layout of a block: a struct followed by its parts. Only the whole block is written, so no
    part is copied twice."""

    def __init__(self, fields: ctypes.Structure) -> None:
        """`fields`: the struct; offsets may be set until the block is written."""
        self._fields = fields
        self._parts: list[tuple[int, Part | StructLayout]] = []
        self._size = ctypes.sizeof(fields)

    @property
    def nbytes(self) -> int:
        return -(-self._size // ALIGNMENT) * ALIGNMENT

    def add(self, part: Part | StructLayout) -> int:
        """Append a part; its offset."""
        at = self.nbytes
        self._parts.append((at, part))
        self._size = at + part.nbytes
        return at

    def norm(self, norm: NormValues | None) -> Norm:
        """The struct of a norm, whose values are appended as parts; None: no norm."""
        if norm is None:
            return Norm()
        fields = Norm(centred=norm.beta is not None, epsilon=norm.epsilon)
        if norm.beta is not None:
            fields.beta = self.add(copied(norm.beta))
        fields.gamma = self.add(copied(norm.gamma))
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


@dataclass(frozen=True)
class Target:
    """A matrix that adapters may target."""

    name: str  # canonical name of its weight
    inputs: int
    outputs: int
    looked_up: bool = False  # an embedding: A is stored [inputs, rank] for row lookup
    before: tuple[int, int] = (0, 0)  # inputs and outputs that precede those of adapters

    @property
    def padded_outputs(self) -> int:
        return -(-self.outputs // PANEL) * PANEL


@dataclass(frozen=True)
class PoolLayout:
    """Layout of a slot in a layer's pool."""

    rank: int
    targets: tuple[Target | None, ...]  # in the layer's order; None: not targeted
    bfloat16: bool = False  # stored as uint16, the upper half of a float32

    @property
    def width(self) -> int:
        """Elements per slot."""
        return sum(self.rank * (one.inputs + one.padded_outputs) for one in self.targets if one)

    @property
    def dtype(self) -> type[np.generic]:
        return np.uint16 if self.bfloat16 else np.float32

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.targets if one}

    def parts(self) -> LoraPair:
        """Offsets of A and B of each matrix in a slot."""
        lora_a, lora_b, at = [-1] * MOST_MATRICES, [-1] * MOST_MATRICES, 0
        for index, one in enumerate(self.targets):
            if one:
                lora_a[index] = at
                lora_b[index] = at + self.rank * one.inputs
                at = lora_b[index] + self.rank * one.padded_outputs
        return LoraPair(self.rank, tuple(lora_a), tuple(lora_b))

    def row(self, adapter: Adapter) -> NDArray[Any]:
        """An adapter's values for a slot [width]."""
        from lite_runner.weights import to_bfloat16

        parts: list[NDArray[np.float32]] = []
        for one in self.targets:
            if one:
                size = (one.inputs, one.padded_outputs)
                a, b = adapter.padded(one.name, self.rank, *size, one.before)
                parts += [a.T if one.looked_up else a]
                parts += [b.reshape(-1, PANEL, self.rank).swapaxes(1, 2)]
        values: NDArray[Any] = np.concatenate([part.reshape(-1) for part in parts])
        return to_bfloat16(values) if self.bfloat16 else values


@dataclass(frozen=True)
class Share:
    """A tensor-parallel rank's part of each layer, of `count` ranks."""

    index: int = 0
    count: int = 1
    vocab_parallel: bool = True  # False: each has the whole embedding and head

    def rows(self, model: Decoder) -> int:
        """Its share of the vocabulary: so many tokens, from `index` times as many on."""
        return model.vocab_size // (self.count if self.vocab_parallel else 1)


WHOLE = Share()


@dataclass(frozen=True)
class Packed:
    """A packed layer and the layout of its adapter pool (None: not targeted)."""

    block: Block
    adapters: PoolLayout | None


class PoolLayouts:
    """Layouts of the adapter pools of a model's layers; None: not targeted."""

    def __init__(self, model: Decoder, lora: LoraSize | None, share: Share = WHOLE) -> None:
        """`lora` None: no adapters."""
        self._model, self._lora = model.shard(share.count), lora
        self._share, self._parameters = share, by_role(model)

    def every(self) -> list[PoolLayout | None]:
        """In the order of `pack`."""
        blocks = enumerate(self._model.blocks)
        pairs = [(self.attention(i, block), self.feed_forward(i, block)) for i, block in blocks]
        return [self.embedding(), *(one for pair in pairs for one in pair), self.head()]

    def embedding(self) -> PoolLayout | None:
        model = self._model
        if model.joins is not None:
            return None
        name = self._parameters["embedding", None, "weight"].name
        return self._layout([Target(name, model.vocab_size, model.hidden_size, looked_up=True)])

    def attention(self, layer: int, block: spec.Block) -> PoolLayout | None:
        parts, hidden = block.attention, self._model.hidden_size
        if block.only == "feed_forward":
            return None
        if (recurrent := block.recurrent) is not None:
            return self._layout(
                [
                    self._target("recurrent_in", layer, hidden, recurrent.channels),
                    self._target("recurrent_gate", layer, hidden, recurrent.values),
                    self._target("recurrent_out", layer, recurrent.values, hidden),
                ]
            )
        queries, keys = parts.heads * parts.head_dim, parts.kv_heads * parts.head_dim
        if parts.latent is not None:
            out = self._target("attention_out", layer, parts.heads * parts.latent.value, hidden)
            return self._layout([None, None, None, out])
        inward: list[Target | None] = [None, None]
        if parts.borrowed is None:
            roles: tuple[Role, Role] = ("key", "key" if parts.values_are_keys else "value")
            inward = [self._target(role, layer, hidden, keys) for role in roles]
        return self._layout(
            [
                self._target("query", layer, hidden, queries * (1 + parts.gated)),
                *inward,
                self._target("attention_out", layer, queries, hidden),
            ]
        )

    def feed_forward(
        self, layer: int, block: spec.Block, surplus: tuple[int, int] = (0, 0)
    ) -> PoolLayout | None:
        """`surplus`: padding beyond the model's width, before and after it."""
        parts, hidden = block.feed_forward, self._model.hidden_size
        if parts.experts is not None or block.only == "mixer":  # adapters target no experts
            return None
        before, wide = surplus[0], parts.width + sum(surplus)
        return self._layout(
            [
                self._target("gate", layer, hidden, wide, (0, before)) if parts.gated else None,
                self._target("up", layer, hidden, wide, (0, before)),
                self._target("down", layer, wide, hidden, (before, 0)),
            ]
        )

    def head(self) -> PoolLayout | None:
        model = self._model  # adapters target a tied head by this name too
        return self._layout([Target(f"{HEAD}.weight", model.hidden_size, self._share.rows(model))])

    def _target(
        self, role: Role, layer: int, inputs: int, outputs: int, before: tuple[int, int] = (0, 0)
    ) -> Target:
        name = self._parameters[role, layer, "weight"].name
        return Target(name, inputs, outputs, before=before)

    def _layout(self, targets: Sequence[Target | None]) -> PoolLayout | None:
        if self._lora is None:
            return None
        size = self._lora
        targeted = [one if one and one.name in size.targets else None for one in targets]
        if not any(targeted):
            return None
        return PoolLayout(size.rank, tuple(targeted), size.bfloat16)


class NativePools:
    """See `lite_runner.backends.adapter_slots.AdapterPools`: one per layer, in memory."""

    holds_bfloat16 = True

    def __init__(self, layouts: Sequence[PoolLayout | None], slots: int) -> None:
        """`layouts` of the layers' pools; None: not targeted."""
        self._layouts = layouts
        self.pools: list[NDArray[Any] | None] = [
            None if layout is None else np.zeros((slots, layout.width), layout.dtype)
            for layout in layouts
        ]
        self.names = {name for layout in layouts if layout for name in layout.names}
        self.nbytes = sum(pool.nbytes for pool in self.pools if pool is not None)

    def load(self, adapter: Adapter, slot: int) -> None:
        for layout, pool in zip(self._layouts, self.pools, strict=True):
            if layout is not None and pool is not None:
                pool[slot] = layout.row(adapter)
