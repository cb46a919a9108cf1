"""The structs of src/layers.h: what stands in front of a packed layer's parts.

An offset counts bytes from the start of its own struct; 0: there is no such part.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64
from enum import IntEnum

PANEL = 32  # outputs that lie side by side
INPUT_GROUP = 32  # inputs that are rounded to int8 with one scale, where the weights have no groups
MOST_MATRICES = 4  # of a layer


class Format(IntEnum):
    """How a matrix is stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    FLOAT16 = 4


class Order(IntEnum):
    """How inputs follow each other in a word."""

    PLAIN = 0
    BYTE_PAIRS = 1
    NIBBLE_PAIRS = 2


class Kind(IntEnum):
    """The layers of a block, by their first word."""

    ATTENTION = 1
    FEED_FORWARD = 2
    EXTENDED_ATTENTION = 3


# Without slots, a field of another name would be set beside the struct.
class Matrix(Structure):
    """A matrix [out, in]; `format` is a Format."""

    __slots__ = ()
    _fields_ = [
        ("format", c_int64),
        ("out", c_int64),
        ("inputs", c_int64),
        ("group", c_int64),
        ("integer_input", c_int64),
        ("data", c_int64),
        ("scales", c_int64),
        ("minimums", c_int64),
        ("sums", c_int64),
        ("bias", c_int64),
    ]


class Norm(Structure):
    """LayerNorm where it is centred, else RMSNorm; its offsets count from the layer."""

    __slots__ = ()
    _fields_ = [
        ("centred", c_int64),
        ("epsilon", c_double),
        ("gamma", c_int64),
        ("beta", c_int64),
    ]


class LoraPair(Structure):
    """Where a place of the layer's pool has A and B of each matrix, in numbers; -1: nowhere."""

    __slots__ = ()
    _fields_ = [
        ("rank", c_int64),
        ("down", c_int64 * MOST_MATRICES),
        ("up", c_int64 * MOST_MATRICES),
    ]


class EmbeddingLayer(Structure):
    """Tokens to rows."""

    __slots__ = ()
    _fields_ = [
        ("hidden", c_int64),
        ("table", c_int64),
        ("positions", c_int64),
        ("has_norm", c_int64),
        ("norm", Norm),
        ("adapters", LoraPair),
    ]


class AttentionLayer(Structure):
    """A norm, attention, and a projection."""

    __slots__ = ()
    _fields_ = [
        ("kind", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary", c_int64),
        ("residual", c_int64),
        ("slopes", c_int64),
        ("query_key_value", c_int64),
        ("projection", c_int64),
        ("norm", Norm),
        ("adapters", LoraPair),
    ]


class ExtendedAttentionLayer(Structure):
    """An attention layer with a window, or norms of its heads' queries and keys."""

    __slots__ = ()
    _fields_ = [
        ("plain", AttentionLayer),
        ("window", c_int64),
        ("query_norm", Norm),
        ("key_norm", Norm),
    ]


class FeedForwardLayer(Structure):
    """A norm, and a feed-forward network."""

    __slots__ = ()
    _fields_ = [
        ("kind", c_int64),
        ("hidden", c_int64),
        ("wide", c_int64),
        ("gated", c_int64),
        ("residual", c_int64),
        ("up", c_int64),
        ("down", c_int64),
        ("norm", Norm),
        ("adapters", LoraPair),
    ]


class HeadLayer(Structure):
    """A norm, and rows to logits."""

    __slots__ = ()
    _fields_ = [
        ("hidden", c_int64),
        ("matrix_offset", c_int64),
        ("norm", Norm),
        ("adapters", LoraPair),
    ]
