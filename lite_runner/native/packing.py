"""Packs layers for the native kernels: one block of bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_int64

import numpy as np
from numpy.typing import NDArray

from lite_runner.native.matrices import matrix
from lite_runner.native.structs import (
    AttentionLayer,
    EmbeddingLayer,
    FeedForwardLayer,
    Floats,
    HeadLayer,
    Kind,
    LoraPair,
    Norm,
    NormValues,
    PoolLayout,
    RecurrentLayer,
    StructLayout,
    copied,
)
from lite_runner.records import dataclass


class JoinLayer(Structure):
    """The input of a layer for multi-token prediction."""

    __slots__ = ()
    _fields_ = [
        *((name, c_int64) for name in ("kind", "hidden", "matrix_offset")),
        ("norm", Norm),
        ("hidden_norm", Norm),
    ]


def join(matrix_layout: StructLayout, norm: NormValues, hidden_norm: NormValues) -> StructLayout:
    """`matrix_layout`: a matrix [hidden, 2 * hidden] of the normed embedding and hidden state."""
    fields = JoinLayer(kind=Kind.JOIN, hidden=len(norm.gamma))
    layout = StructLayout(fields)
    fields.matrix_offset = layout.add(matrix_layout)
    fields.norm, fields.hidden_norm = layout.norm(norm), layout.norm(hidden_norm)
    return layout


@dataclass(frozen=True)
class SideInputs:
    """Numbers of a token for each of the layers: see EmbeddingLayer in src/layers.h."""

    layers: int
    table: StructLayout
    inward: StructLayout
    norm: NormValues


def embedding(
    table: StructLayout,
    positions: Floats | None,
    norm: NormValues | None,
    adapters: PoolLayout | None,
    *,
    hidden: int,
    side: SideInputs | None = None,
) -> StructLayout:
    """`table`: a matrix [vocab, hidden], which a tied head reads too."""
    fields = EmbeddingLayer(hidden=hidden, adapters=_lora_pair(adapters))
    layout = StructLayout(fields)
    fields.table = layout.add(table)
    if side is not None:
        fields.side, fields.side_layers = len(side.norm.gamma), side.layers
        fields.side_table, fields.side_inward = map(layout.add, (side.table, side.inward))
        fields.table_scale, fields.side_scale = fields.side**0.5, 2**-0.5
        fields.side_norm = layout.norm(side.norm)
    if positions is not None:
        fields.positions = layout.add(matrix(positions))
    fields.norm = layout.norm(norm)
    return layout


@dataclass(frozen=True)
class LatentLayout:
    """Sizes of latent attention: see AttentionLayer in src/layers.h."""

    places: NDArray[np.int32]
    absorb: Floats  # flat, as `expand`
    expand: Floats
    norm: NormValues
    query: StructLayout | None
    query_norm: NormValues | None


def attention(
    fields: AttentionLayer,
    inward: StructLayout,
    outward: StructLayout,
    norm: NormValues | None,
    adapters: PoolLayout | None = None,
    *,
    slopes: Floats | None = None,
    sinks: Floats | None = None,
    placed_queries: Floats | None = None,
    temperatures: Floats | None = None,
    latent: LatentLayout | None = None,
    query_norm: NormValues | None = None,
    key_norm: NormValues | None = None,
    value_norm: NormValues | None = None,
    post_norm: NormValues | None = None,
    sum_norm: NormValues | None = None,
) -> StructLayout:
    """Pack an attention layer whose sizes and flags are in `fields`; `inward` is the fused qkv
    projection, `outward` the output one.

    `slopes`: ALiBi's [heads]. `query_norm`, `key_norm`: their gamma is [head_dim] for each head, or
    that of all heads together with `joint_norm` and `apart_norm`. `post_norm`: of the output;
    `sum_norm`: of that and the input.
    """
    fields.kind, fields.adapters = Kind.ATTENTION, _lora_pair(adapters)
    layout = StructLayout(fields)
    if slopes is not None:
        fields.slopes = layout.add(copied(slopes))
    if sinks is not None:
        fields.sinks = layout.add(copied(sinks))
    if placed_queries is not None:
        fields.placed_queries = layout.add(copied(placed_queries))
    if temperatures is not None:
        fields.temperatures = layout.add(copied(temperatures))
    if latent is not None:
        fields.places, fields.absorb = map(layout.add, map(copied, (latent.places, latent.absorb)))
        fields.expand = layout.add(copied(latent.expand))
        fields.latent_norm = layout.norm(latent.norm)
        if latent.query is not None:
            fields.query = layout.add(latent.query)
            fields.latent_query_norm = layout.norm(latent.query_norm)
    fields.query_key_value = layout.add(inward)
    fields.projection = layout.add(outward)
    fields.norm = layout.norm(norm)
    fields.query_norm, fields.key_norm = layout.norm(query_norm), layout.norm(key_norm)
    fields.value_norm = layout.norm(value_norm)
    fields.residual.norm, fields.residual.sum_norm = layout.norm(post_norm), layout.norm(sum_norm)
    return layout


def recurrent(
    fields: RecurrentLayer,
    inward: StructLayout,
    rates: StructLayout,
    outward: StructLayout,
    norm: NormValues | None,
    out_norm: NormValues,
    adapters: PoolLayout | None = None,
    *,
    taps: Floats,
    taps_bias: Floats | None,
    decay: Floats,
    rate_bias: Floats,
    skip: Floats | None,
    post_norm: NormValues | None = None,
    sum_norm: NormValues | None = None,
) -> StructLayout:
    """Pack a recurrent layer: see RecurrentLayer in src/layers.h. `taps` [kernel, channels]."""
    fields.kind, fields.adapters = Kind.RECURRENT, _lora_pair(adapters)
    layout = StructLayout(fields)
    fields.taps = layout.add(copied(taps.reshape(-1)))
    if taps_bias is not None:
        fields.taps_bias = layout.add(copied(taps_bias))
    fields.decay, fields.rate_bias = layout.add(copied(decay)), layout.add(copied(rate_bias))
    if skip is not None:
        fields.skip = layout.add(copied(skip))
    fields.inward, fields.rates = layout.add(inward), layout.add(rates)
    fields.projection = layout.add(outward)
    fields.norm, fields.out_norm = layout.norm(norm), layout.norm(out_norm)
    fields.residual.norm, fields.residual.sum_norm = layout.norm(post_norm), layout.norm(sum_norm)
    return layout


@dataclass(frozen=True)
class SideNetwork:
    """Matrices and norm of per-layer inputs: see Side in src/layers.h."""

    gate: StructLayout
    down: StructLayout
    norm: NormValues


def none() -> StructLayout:
    """An absent layer."""
    return StructLayout(FeedForwardLayer(kind=Kind.NONE))


def feed_forward(
    fields: FeedForwardLayer,
    up: StructLayout,
    down: StructLayout,
    norm: NormValues | None,
    adapters: PoolLayout | None = None,
    *,
    post_norm: NormValues | None = None,
    sum_norm: NormValues | None = None,
    side: SideNetwork | None = None,
) -> StructLayout:
    """Pack a feed-forward layer; `up`: gate and up as Alternating panels if `gated`."""
    fields.kind, fields.adapters = Kind.FEED_FORWARD, _lora_pair(adapters)
    layout = StructLayout(fields)
    _add_side(layout, fields, side)
    fields.up, fields.down = layout.add(up), layout.add(down)
    fields.norm, fields.residual.norm = layout.norm(norm), layout.norm(post_norm)
    fields.residual.sum_norm = layout.norm(sum_norm)
    return layout


def _add_side(layout: StructLayout, fields: FeedForwardLayer, side: SideNetwork | None) -> None:
    if side is not None:
        fields.side.gate, fields.side.down = layout.add(side.gate), layout.add(side.down)
        fields.side.residual.norm = layout.norm(side.norm)


@dataclass(frozen=True)
class ApartNorms:
    """Norms of experts and of the network beside them, where `norm` is the router's, and the
    experts' factors: see FeedForwardLayer in src/layers.h."""

    expert: NormValues | None
    expert_out: NormValues | None
    shared: NormValues | None
    shared_out: NormValues | None
    scales: Floats


def experts(
    fields: FeedForwardLayer,
    router: StructLayout,
    ups: Sequence[StructLayout],
    downs: Sequence[StructLayout],
    norm: NormValues | None,
    *,
    post_norm: NormValues | None = None,
    sum_norm: NormValues | None = None,
    choice_bias: Floats | None = None,
    shared: tuple[StructLayout, StructLayout] | None = None,
    apart: ApartNorms | None = None,
    side: SideNetwork | None = None,
) -> StructLayout:
    """Pack a mixture of experts; `router`: a matrix [experts, hidden]; `ups`: gate and up of each
    as Alternating panels if `gated`; `shared`: the same of the shared expert, and down."""
    fields.kind, fields.adapters = Kind.EXPERTS, _lora_pair(None)
    fields.experts = len(ups)
    layout = StructLayout(fields)
    _add_side(layout, fields, side)
    if apart is not None:
        fields.expert_norm, fields.expert_out_norm, fields.shared_norm, fields.shared_out_norm = (
            layout.norm(one)
            for one in (apart.expert, apart.expert_out, apart.shared, apart.shared_out)
        )
        fields.expert_scales = layout.add(copied(apart.scales))
    fields.router = layout.add(router)
    if choice_bias is not None:
        fields.choice_bias = layout.add(copied(choice_bias))
    if shared is not None:
        fields.shared_up, fields.shared_down = map(layout.add, shared)
    fields.up = layout.add(copied(np.array([layout.add(one) for one in ups], np.int64)))
    fields.down = layout.add(copied(np.array([layout.add(one) for one in downs], np.int64)))
    fields.norm, fields.residual.norm = layout.norm(norm), layout.norm(post_norm)
    fields.residual.sum_norm = layout.norm(sum_norm)
    return layout


def head(
    matrix_layout: StructLayout | None,
    norm: NormValues | None,
    adapters: PoolLayout | None,
    *,
    hidden: int,
) -> StructLayout:
    """Pack the head; None: it is tied to the embedding."""
    fields = HeadLayer(hidden=hidden, adapters=_lora_pair(adapters))
    layout = StructLayout(fields)
    if matrix_layout is not None:
        fields.matrix_offset = layout.add(matrix_layout)
    fields.norm = layout.norm(norm)
    return layout


def _lora_pair(adapters: PoolLayout | None) -> LoraPair:
    """None: no adapter targets the layer."""
    return (adapters or PoolLayout(0, ())).parts()
