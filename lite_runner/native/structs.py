"""Packed layers: ctypes mirrors of the structs in src/layers.h, and the parts behind them.

Offsets are in bytes from the start of the struct; 0: the part is absent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, c_double, c_int64
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.records import dataclass

PANEL = 32  # adjacent outputs
INPUT_GROUP = 32  # inputs that share an int8 scale where the weights have no groups
MOST_MATRICES = 4  # per layer
MOST_PARTS = 3  # of a joined matrix
MOST_HEAD_DIM = 1024
MOST_GROUP = 256  # whose products of 16 bits by 8 add up in 32


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
    _fields_ = [
        ("plain", Matrix),
        *_integers("count by_turns"),
        ("parts", c_int64 * MOST_PARTS),
    ]


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
    _fields_ = [*_integers("hidden table positions"), ("norm", Norm), ("adapters", LoraPair)]


class Residual(Structure):
    """The residual connection of a layer: x + scale * norm(output); with `normed_input` to that
    times the normed input."""

    __slots__ = ()
    _fields_ = [("norm", Norm), ("scale", c_double), ("normed_input", c_double)]


class AttentionLayer(Structure):
    """Norm, attention and output projection."""

    __slots__ = ()
    _fields_ = [
        *_integers("kind hidden heads kv_heads head_dim rotary rope_width rope_offset"),
        *_integers("slopes window chunk temperatures span prefix parallel"),
        *_integers("joint_norm apart_norm late_norm sinks gated"),
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


class FeedForwardLayer(Structure):
    """Norm and feed-forward network. Of a mixture of experts `up` and `down` are int64 [experts]:
    offsets of each one's matrices."""

    __slots__ = ()
    _fields_ = [
        *_integers("kind hidden wide gated activation parallel up down"),
        *_integers("experts chosen renormalized sigmoid choice_bias"),
        *_integers("groups chosen_groups best_of_group router"),
        *_integers("shared shared_up shared_down shared_gate scaled_inputs"),
        ("scale", c_double),
        ("limit", c_double),
        ("norm", Norm),
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
    """A piece of a block; `write` fills its bytes there."""

    nbytes: int
    write: Callable[[Block], None]


def copied(array: NDArray[Any]) -> Part:
    """An array [n], as it is."""

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
