"""Packs layers for the native kernels: one block of bytes each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lite_runner.native import structs
from lite_runner.native.lora_pool import PoolLayout
from lite_runner.native.matrices import matrix
from lite_runner.native.structs import Copy, Floats, Kind, Layout, NormValues
from lite_runner.records import dataclass


def embedding(
    table: Layout,
    positions: Floats | None,
    norm: NormValues | None,
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
    """The residual connection of a layer: x + scale * norm(output); with `normed` to that
    times the normed input. `parallel`: a feed-forward layer takes the input of the attention layer
    before it, but adds to that one's output."""

    scale: float
    norm: NormValues | None
    normed: float | None = None
    parallel: bool = False


@dataclass(frozen=True)
class GeneralAttention:
    """Fields of general attention layers alone."""

    scale: float  # of scores
    residual: Residual
    joint_norm: bool = False  # query and key norm over all heads together
    softcap: float | None = None  # of scores
    rope: tuple[int, int] = (0, 0)  # numbers in a row of the rotary table; this layer's first
    prefix: bool = False  # a step says which key is the last that each token sees


@dataclass(frozen=True)
class GeneralFeedForward:
    """Fields of general feed-forward layers alone."""

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
    norm: NormValues | None,
    adapters: PoolLayout | None,
    *,
    slopes: Floats | None = None,
    qk_norm: tuple[NormValues | None, NormValues | None] = (None, None),
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
        widest.scale = general.scale
        widest.joint_norm, widest.softcap = general.joint_norm, general.softcap or 0.0
        widest.rope_width, widest.rope_offset = general.rope
        widest.prefix = general.prefix
    fields.hidden = shape.hidden
    fields.heads, fields.kv_heads, fields.head_dim = shape.heads, shape.kv_heads, shape.head_dim
    fields.rotary, fields.residual = shape.rotary, shape.residual
    fields.adapters = _parts_of(adapters)
    layout = Layout(widest if general is not None else whole if extended else fields)
    if slopes is not None:
        fields.slopes = layout.add(Copy(slopes))
    fields.query_key_value = layout.add(inward)
    fields.projection = layout.add(outward)
    if norm is not None:
        fields.norm = layout.norm(norm)
    query_norm, key_norm = qk_norm
    if query_norm is not None:
        whole.query_norm = layout.norm(query_norm)
    if key_norm is not None:
        whole.key_norm = layout.norm(key_norm)
    if general is not None:
        _set_residual(layout, widest, general.residual)
    return layout


def feed_forward(
    up: Layout,
    down: Layout,
    norm: NormValues | None,
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
        whole.activation = general.activation
        _set_residual(layout, whole, general.residual)
    return layout


@dataclass(frozen=True)
class Routing:
    """The router of a mixture of experts."""

    router: Layout  # matrix [experts, hidden]
    chosen: int  # experts of a token
    renormalized: bool


def experts(
    routing: Routing,
    ups: Sequence[Layout],
    downs: Sequence[Layout],
    norm: NormValues | None,
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
    fields.up = layout.add(Copy(np.array([layout.add(one) for one in ups], np.int64)))
    fields.down = layout.add(Copy(np.array([layout.add(one) for one in downs], np.int64)))
    if norm is not None:
        fields.norm = layout.norm(norm)
    whole.general.activation = general.activation
    _set_residual(layout, whole.general, general.residual)
    return layout


def head(
    matrix_layout: Layout | None,
    norm: NormValues | None,
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
    if norm is not None:
        fields.norm = layout.norm(norm)
    return layout


def _set_residual(
    layout: Layout,
    fields: structs.GeneralAttentionLayer | structs.GeneralFeedForwardLayer,
    residual: Residual,
) -> None:
    fields.residual_scale, fields.parallel = residual.scale, residual.parallel
    fields.normed_residual = residual.normed or 0.0
    if residual.norm is not None:
        fields.post_norm = layout.norm(residual.norm)


def _parts_of(adapters: PoolLayout | None) -> structs.LoraPair:
    """None: no adapter targets the layer."""
    return (adapters or PoolLayout(0, ())).parts()
