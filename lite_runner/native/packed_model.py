"""Packs a described model's layers for the native kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lite_runner.architectures import by_expert, by_role, spec
from lite_runner.architectures.naming import HEAD, Part, Role
from lite_runner.architectures.positions import absorbed, alibi_slopes, latent_places
from lite_runner.native import matrices, packing
from lite_runner.native.matrices import Weight
from lite_runner.native.structs import (
    WHOLE,
    Activation,
    AttentionLayer,
    FeedForwardLayer,
    Floats,
    NormValues,
    Packed,
    PoolLayouts,
    RecurrentLayer,
    Residual,
    Room,
    Share,
    Side,
    StructLayout,
    aligned,
)

if TYPE_CHECKING:
    from lite_runner.weights.lora.adapter import LoraSize

_INWARD: tuple[Role, ...] = ("query", "key", "value")
_SIDE_MATRICES: tuple[Role, ...] = ("side_gate", "side_out")
_SHARED: tuple[Role, ...] = ("shared_gate", "shared_up")
_EXPERTS: tuple[Role, ...] = ("expert_gate", "expert_down", "expert_up")  # as they are read


_ACTIVATIONS: dict[spec.Activation, Activation] = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_exact": Activation.GELU_EXACT,
    "quick_gelu": Activation.QUICK_GELU,
    "relu": Activation.RELU,
    "relu_squared": Activation.RELU_SQUARED,
}


class WeightSource(Protocol):
    """Source of a model's tensors by canonical name; each can be taken once."""

    def matrix(self, name: str) -> Weight:
        """Weight [out, in] of a linear layer, the embedding or the head."""
        ...

    def vector(self, name: str) -> Floats:
        """Any other tensor."""
        ...


def pack(
    model: spec.Decoder,
    weights: WeightSource,
    lora: LoraSize | None = None,
    *,
    rounded_input: bool = False,
    dequantize: bool = False,
    room: Room = aligned,
    share: Share = WHOLE,
) -> Iterator[Packed]:
    """The layers of a model that is not `unsupported`, one after the other: embedding, attention
    and feed-forward of each block, head; a layer for multi-token prediction has what joins its
    inputs in place of the embedding. Each takes its weights, or a rank's `share` of them, when it
    is packed, in a `room` of its own.

    `rounded_input` and `dequantize`: see matrices.matrix.
    """
    layouts, local = PoolLayouts(model, lora, share), model.shard(share.count)
    packer = _Packer(local, weights, layouts, rounded_input, dequantize, room, share)
    yield packer.embedding() if model.joins is None else packer.join(model.joins)
    for layer, block in enumerate(local.blocks):
        yield packer.mixer(layer, block)
        yield packer.feed_forward(layer, block)
    yield packer.head()


def _rope_columns(model: spec.Decoder, attention: spec.Attention) -> tuple[int, int]:
    """Width of a row of the rotary table, and where a layer's cos and sin begin in it: the model's
    different rotary positions are side by side. (0, 0): the layer has none."""
    if attention.rotary is None:
        return 0, 0
    index = model.rotaries.index(attention.rotary)
    widths = [model.rotated_head(one) for one in model.rotaries]
    return sum(widths), sum(widths[:index])


class _Packer:
    """Takes a model's weights by role and packs them.

    The kernels know no embedding scale: hidden states are kept divided by it. Norms undo that, with
    an epsilon that fits, and what is added to the hidden states is divided too.
    """

    def __init__(
        self,
        model: spec.Decoder,
        weights: WeightSource,
        layouts: PoolLayouts,
        rounded_input: bool,
        dequantize: bool,
        room: Room,
        share: Share,
    ) -> None:
        """`model`: of the share."""
        self._model, self._weights, self._layouts, self._share = model, weights, layouts, share
        self._rounded_input, self._dequantize, self._room = rounded_input, dequantize, room
        self._parameters, self._experts = by_role(model), by_expert(model)
        self._biases = by_expert(model, "bias")
        self._shared_norm: NormValues | None = None  # of the attention packed last

    def embedding(self) -> Packed:
        model, layout = self._model, self._layouts.embedding()
        positions = None
        if model.learned_positions:
            positions = self._weights.vector(self._name("positions"))[model.position_offset :]
        norm = self._norm(model.embedding_norm, "embedding_norm")
        table = self._packed(self._weights.matrix(self._name("embedding")))
        side = None
        if model.side is not None:
            side_norm = self._norm(model.side.norm, "side_norm")
            assert side_norm is not None
            # Embeddings are there without their scale, which is taken out of the matrix's inputs.
            scale = np.float32(model.embedding_scale * model.hidden_size**-0.5)
            side = packing.SideInputs(
                model.num_layers,
                self._packed(self._weights.matrix(self._name("side_table"))),
                matrices.matrix(self._weights.vector(self._name("side_inward")) * scale),
                side_norm,
            )
        block = packing.embedding(
            table, positions, norm, layout, hidden=model.hidden_size, side=side
        )
        return Packed(block.block(self._room), layout)

    def join(self, given: spec.Norm) -> Packed:
        norms = [self._norm(given, role) for role in ("join_norm", "join_hidden_norm")]
        embedding, hidden = norms
        assert embedding is not None and hidden is not None
        matrix = self._packed(self._weights.matrix(self._name("join")))
        return Packed(packing.join(matrix, embedding, hidden).block(self._room), None)

    def mixer(self, layer: int, block: spec.Block) -> Packed:
        if block.only == "feed_forward":
            return Packed(packing.none().block(self._room), None)
        if block.recurrent is not None:
            return self._recurrent(layer, block, block.recurrent)
        return self._attention(layer, block)

    def _recurrent(self, layer: int, block: spec.Block, parts: spec.Recurrent) -> Packed:
        layout = self._layouts.attention(layer, block)
        inner: tuple[Role, ...] = ("recurrent_in", "recurrent_gate")
        asked: tuple[Role, ...] = ("recurrent_decay",)
        if parts.delta:
            asked = "recurrent_beta", *asked
        bias = rates_bias = None
        if parts.bias:
            bias = np.concatenate([self._bias(role, layer) for role in inner])
            rates_bias = self._bias("recurrent_decay", layer)
        rates = np.concatenate([self._weights.vector(self._name(role, layer)) for role in asked])
        taps = self._weights.vector(self._name("recurrent_taps", layer))
        norm = self._weights.vector(self._name("recurrent_gain", layer))
        # In float64, so that the rounded result is the same on every processor.
        logarithms = self._weights.vector(self._name("recurrent_log", layer)).astype(np.float64)
        fields = RecurrentLayer(
            hidden=self._model.hidden_size,
            heads=parts.heads,
            key_heads=parts.key_heads,
            key_dim=parts.key_dim,
            value_dim=parts.value_dim,
            kernel=parts.kernel,
            delta=parts.delta,
            groups=parts.groups,
            residual=self._residual(block),
        )
        packed = packing.recurrent(
            fields,
            self._packed(matrices.stacked([self._matrix(role, layer) for role in inner]), bias),
            matrices.matrix(rates, rates_bias),
            self._packed(
                self._matrix("recurrent_out", layer),
                self._summed_bias("recurrent_out", layer, parts.bias),
            ),
            self._norm_of_hidden(block.norm, "attention_norm", layer),
            NormValues(np.tile(norm, parts.values // len(norm)), None, parts.norm.eps),
            layout,
            taps=np.ascontiguousarray(taps.reshape(parts.channels, parts.kernel).T),
            taps_bias=self._bias("recurrent_taps", layer) if parts.conv_bias else None,
            decay=-np.exp(logarithms).astype(np.float32),
            rate_bias=self._weights.vector(self._name("recurrent_rate", layer)),
            skip=None if parts.delta else self._weights.vector(self._name("recurrent_skip", layer)),
            post_norm=self._norm(block.post_norm, "attention_post_norm", layer),
            sum_norm=self._sum_norm(block.sum_norm, "sum_norm", layer),
        )
        return Packed(packed.block(self._room), layout)

    def _attention(self, layer: int, block: spec.Block) -> Packed:
        parts = block.attention
        layout = self._layouts.attention(layer, block)
        latent, bias = None, None
        inward: Weight | matrices.Stacked
        if parts.latent is not None:
            latent, inward, bias = self._latent(layer, parts, parts.latent)
        else:
            roles = _INWARD if parts.borrowed is None else _INWARD[:1]
            made = roles[:2] if parts.values_are_keys else roles[parts.placed_query :]
            every = {role: self._matrix(role, layer) for role in made}
            inward = matrices.stacked([every.get(role, every[made[-1]]) for role in roles])
            if parts.qkv_bias:
                shifts = {role: self._bias(role, layer) for role in made}
                bias = np.concatenate([shifts.get(role, shifts[made[-1]]) for role in roles])
        outward = self._matrix("attention_out", layer)
        query_norm = self._norm(parts.qk_norm, "query_norm", layer)
        own_keys = parts.borrowed is None
        key_norm = self._norm(parts.qk_norm, "key_norm", layer) if own_keys else None
        post_norm = self._norm(block.post_norm, "attention_post_norm", layer)
        inward_norm = self._norm_of_hidden(block.norm, "attention_norm", layer)
        self._shared_norm = inward_norm if block.shared_norm else None
        rope_width, rope_offset = _rope_columns(self._model, parts)
        fields = AttentionLayer(
            hidden=self._model.hidden_size,
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            head_dim=parts.head_dim,
            rotary=parts.rotary is not None,
            rope_width=rope_width,
            rope_offset=rope_offset,
            window=parts.window or 0,
            chunk=parts.chunk or 0,
            span=0 if parts.temperature is None else parts.temperature.span,
            prefix=self._model.prefix is not None,
            parallel=block.parallel,
            joint_norm=not parts.qk_norm_by_head,
            apart_norm=parts.qk_norm_apart,
            late_norm=parts.qk_norm_late,
            gated=parts.gated,
            borrowed=not own_keys,
            scale=parts.head_dim**-0.5 if parts.scale is None else parts.scale,
            softcap=parts.softcap or 0.0,
            clip=parts.clip or 0.0,
            residual=self._residual(block),
        )
        if parts.latent is not None:
            fields.latent, fields.latent_value = parts.latent.rank, parts.latent.value
            fields.latent_width = parts.latent.plain + parts.latent.rotated
            fields.query_rank = parts.latent.query_rank or 0
        packed = packing.attention(
            fields,
            self._packed(inward, bias),
            self._packed(outward, self._summed_bias("attention_out", layer, parts.out_bias)),
            inward_norm,
            layout,
            slopes=self._slopes(parts) if parts.alibi else None,
            latent=latent,
            sinks=self._weights.vector(self._name("sinks", layer)) if parts.sinks else None,
            placed_queries=self._placed_queries(layer, parts) if parts.placed_query else None,
            temperatures=self._temperatures(parts.temperature),
            query_norm=query_norm,
            key_norm=key_norm,
            value_norm=self._norm(parts.value_norm, "value", layer, parts.head_dim),
            post_norm=post_norm,
            sum_norm=self._sum_norm(block.sum_norm, "sum_norm", layer),
        )
        return Packed(packed.block(self._room), layout)

    def _placed_queries(self, layer: int, parts: spec.Attention) -> Floats:
        """Queries of each position, in place of those that the fused matrix makes."""
        places, query = (
            self._weights.vector(self._name(role, layer)).astype(np.float64)
            for role in ("query_places", "query")
        )
        bias = self._bias("query", layer) if parts.qkv_bias else np.float32(0)
        made: Floats = (places @ query.T + bias).astype(np.float32)
        return made.reshape(-1)

    def _latent(
        self, layer: int, parts: spec.Attention, latent: spec.Latent
    ) -> tuple[packing.LatentLayout, Floats, Floats | None]:
        """The further parts of latent attention, and its first matrix with the bias."""
        values = self._weights.vector(self._name("latent_values", layer))
        absorb, expand = absorbed(latent, parts.heads, values)
        low = latent.query_rank is not None
        first: Role = "latent_query" if low else "query"
        roles: tuple[Role, Role] = (first, "latent")
        inward = [self._weights.vector(self._name(role, layer)) for role in roles]
        bias = None
        if parts.qkv_bias:
            biases = [
                self._bias(role, layer) if role != "query" else np.zeros(len(one), np.float32)
                for role, one in zip(roles, inward, strict=True)
            ]
            bias = np.concatenate(biases)
        norm = self._norm(latent.norm, "latent_norm", layer)
        assert norm is not None
        query = self._weights.vector(self._name("query", layer)) if low else None
        layout = packing.LatentLayout(
            latent_places(latent),
            absorb.reshape(-1),
            expand.reshape(-1),
            norm,
            None if query is None else matrices.matrix(query),
            self._norm(latent.norm, "latent_query_norm", layer) if low else None,
        )
        return layout, np.concatenate(inward), bias

    def feed_forward(self, layer: int, block: spec.Block) -> Packed:
        parts = block.feed_forward
        if block.only == "mixer":
            return Packed(packing.none().block(self._room), None)
        if parts.experts is not None:
            return self._mixture(layer, block, parts.experts)
        down = self._matrix("down", layer)
        surplus = self._surplus(down, parts.width)
        layout = self._layouts.feed_forward(layer, block, surplus)

        def wide(role: Role) -> tuple[Weight, Floats | None]:
            weight = matrices.with_zeros(self._matrix(role, layer), surplus)
            return weight, np.pad(self._bias(role, layer), surplus) if parts.bias else None

        up, bias = wide("up")
        if parts.gated:
            gate, of_gate = wide("gate")
            both = None if of_gate is None or bias is None else (of_gate, bias)
            upward = self._packed(matrices.Alternating(gate, up), both)
        else:
            upward = self._packed(up, bias)
        fields = self._feed_forward_fields(layer, block, surplus)
        fields.parallel = block.parallel
        packed = packing.feed_forward(
            fields,
            upward,
            self._packed(down, self._summed_bias("down", layer, parts.biased_down)),
            self._shared_norm or self._norm_of_hidden(block.norm, "feed_forward_norm", layer),
            layout,
            post_norm=self._norm(block.post_norm, "feed_forward_post_norm", layer),
            sum_norm=self._sum_norm(block.out_norm, "out_norm", layer),
            side=self._side(layer),
        )
        return Packed(packed.block(self._room), layout)

    def _side(self, layer: int) -> packing.SideNetwork | None:
        if self._model.side is None:
            return None
        gate, down = (
            matrices.matrix(self._weights.vector(self._name(role, layer)))
            for role in _SIDE_MATRICES
        )
        norm = self._norm(self._model.side.norm, "side_out_norm", layer)
        assert norm is not None
        return packing.SideNetwork(gate, down, norm)

    def _mixture(self, layer: int, block: spec.Block, experts: spec.Experts) -> Packed:
        # The inputs of all experts are rounded alike.
        router = self._weights.vector(self._name("router", layer))
        router_bias = self._bias("router", layer) if experts.router_bias else None
        choice_bias = self._bias("choice_bias", layer) if experts.choice_bias else None
        if experts.shared_gate:
            last = self._weights.vector(self._name("shared_router", layer))
            router = np.concatenate([router, last])
            router_bias = None if router_bias is None else np.append(router_bias, np.float32(0))
        shared = None
        gated = block.feed_forward.gated
        if experts.shared:
            pair = [self._matrix(role, layer) for role in _SHARED[not gated :]]
            wide = matrices.Alternating(*matrices.alike(pair)) if gated else pair[0]
            shared = self._packed(wide), self._packed(self._matrix("shared_down", layer))
        gates, downs, ups = (
            [self._weights.matrix(one.name) for one in self._experts.get((role, layer), ())]
            for role in _EXPERTS
        )
        outward = matrices.alike(downs)
        surplus = self._surplus(outward[0], block.feed_forward.width)
        inward = matrices.alike([matrices.with_zeros(one, surplus) for one in (*gates, *ups)])
        pairs: Iterable[Weight | matrices.Alternating] = inward
        if gated:
            pairs = map(matrices.Alternating, inward[: experts.count], inward[experts.count :])
        fields = self._feed_forward_fields(layer, block, surplus)
        fields.chosen, fields.renormalized = experts.chosen, experts.renormalized
        fields.sigmoid, fields.scale = experts.sigmoid, experts.scale
        fields.groups, fields.chosen_groups = experts.groups, experts.chosen_groups
        fields.best_of_group = experts.best_of_group
        fields.shared, fields.shared_gate = experts.shared, experts.shared_gate
        fields.scaled_inputs = experts.scaled_inputs
        biases: dict[Role, list[Floats | None]] = {
            role: [self._weights.vector(one.name) for one in self._biases[role, layer]]
            if (role, layer) in self._biases
            else [None] * experts.count
            for role in _EXPERTS
        }
        both = zip(biases["expert_gate"], biases["expert_up"], strict=True)
        norm = self._norm_of_hidden(block.norm, "feed_forward_norm", layer)
        apart = None
        if experts.apart:
            assert block.norm is not None and norm is not None
            apart = packing.ApartNorms(
                self._norm_of_hidden(block.norm, "expert_norm", layer),
                self._norm(block.norm, "expert_out_norm", layer),
                norm,
                self._norm(block.norm, "shared_out_norm", layer),
                self._weights.vector(self._name("expert_scales", layer)),
            )
            scale = np.float32(self._model.hidden_size**-0.5)
            gain = self._weights.vector(self._name("router_scale", layer)) * scale
            norm = NormValues(gain, None, norm.epsilon)
        packed = packing.experts(
            fields,
            matrices.matrix(router, router_bias),
            [
                self._packed(pair, None if one is None or two is None else (one, two))
                for pair, (one, two) in zip(pairs, both, strict=True)
            ],
            [
                self._packed(down, bias)
                for down, bias in zip(outward, biases["expert_down"], strict=True)
            ],
            norm,
            post_norm=self._norm(block.post_norm, "feed_forward_post_norm", layer),
            sum_norm=self._sum_norm(block.out_norm, "out_norm", layer),
            choice_bias=choice_bias,
            shared=shared,
            apart=apart,
            side=self._side(layer),
        )
        return Packed(packed.block(self._room), None)

    def _feed_forward_fields(
        self, layer: int, block: spec.Block, surplus: tuple[int, int]
    ) -> FeedForwardLayer:
        parts, model = block.feed_forward, self._model
        side = Side(layer=layer, layers=model.num_layers, gate_scale=model.embedding_scale)
        side.width = 0 if model.side is None else model.side.width
        side.residual.scale = 1 / model.embedding_scale
        if block.scaled:
            side.factor = self._weights.vector(self._name("block_scale", layer)).item()
        return FeedForwardLayer(
            hidden=model.hidden_size,
            wide=parts.width + sum(surplus),
            gated=parts.gated,
            side=side,
            activation=_ACTIVATIONS[parts.function],
            limit=parts.limit or 0.0,
            residual=self._residual(block),
        )

    def head(self) -> Packed:
        model = self._model
        matrix = None
        if not model.tie_word_embeddings:
            bias = self._weights.vector(f"{HEAD}.bias") if model.head_bias else None
            matrix = self._packed(self._weights.matrix(f"{HEAD}.weight"), bias)
        layout = self._layouts.head()
        norm = self._norm_of_hidden(model.norm, "norm")
        norm = norm and _divided(norm, model.logits_scaling)
        block = packing.head(matrix, norm, layout, hidden=model.hidden_size)
        return Packed(block.block(self._room), layout)

    def _name(self, role: Role, layer: int | None = None, kind: Part = "weight") -> str:
        return self._parameters[role, layer, kind].name

    def _matrix(self, role: Role, layer: int) -> Weight:
        return self._weights.matrix(self._name(role, layer))

    def _bias(self, role: Role, layer: int) -> Floats:
        return self._weights.vector(self._name(role, layer, "bias"))

    def _summed_bias(self, role: Role, layer: int, there: bool) -> Floats | None:
        """The bias of a matrix whose outputs ranks sum: the first one adds it."""
        bias = self._bias(role, layer) if there else None
        return bias if self._share.index == 0 else None

    def _slopes(self, parts: spec.Attention) -> Floats:
        first = self._share.index * parts.heads
        every = alibi_slopes(self._share.count * parts.heads) * np.float32(parts.alibi_scale)
        return every[first : first + parts.heads]

    def _temperatures(self, given: spec.Temperature | None) -> Floats | None:
        if given is None:
            return None
        spans = np.arange(self._model.seq_length // given.span + 1)
        scales: Floats = (1 + given.weight * np.log1p(spans)).astype(np.float32)
        return scales

    def _surplus(self, down: Weight, width: int) -> tuple[int, int]:
        return matrices.surplus(down, self._share.index * width, width)

    def _norm(
        self, norm: spec.Norm | None, role: Role, layer: int | None = None, size: int | None = None
    ) -> NormValues | None:
        """`size`: of heads, where they are not all of one."""
        if norm is None:
            return None
        if not norm.gain:
            return NormValues(np.ones(size or self._model.head_dim, np.float32), None, norm.eps)
        gain = self._weights.vector(self._name(role, layer))
        shift = None
        if norm.kind == "layer":
            shift = np.zeros_like(gain)
            if norm.bias:
                shift = self._weights.vector(self._name(role, layer, "bias"))
        return NormValues(gain, shift, norm.eps)

    def _norm_of_hidden(
        self, norm: spec.Norm | None, role: Role, layer: int | None = None
    ) -> NormValues | None:
        scaled = norm and replace(norm, eps=norm.eps / self._model.embedding_scale**2)
        return self._norm(scaled, role, layer)

    def _sum_norm(self, norm: spec.Norm | None, role: Role, layer: int) -> NormValues | None:
        found = self._norm_of_hidden(norm, role, layer)
        return found and _divided(found, self._model.embedding_scale)

    def _residual(self, block: spec.Block) -> Residual:
        scale = self._model.embedding_scale
        normed = (block.normed_residual or 0.0) / scale
        return Residual(scale=block.residual_scale / scale, normed_input=normed)

    def _packed(
        self,
        weight: Weight | matrices.Alternating | matrices.Stacked,
        bias: Floats | tuple[Floats, Floats] | None = None,
    ) -> StructLayout:
        return matrices.matrix(
            weight, bias, rounded_input=self._rounded_input, dequantize=self._dequantize
        )


def _divided(norm: NormValues, by: float) -> NormValues:
    """The norm whose outputs are those divided by a number."""
    if by == 1:
        return norm
    factor = np.float32(by)
    beta = None if norm.beta is None else norm.beta / factor
    return NormValues(norm.gamma / factor, beta, norm.epsilon)
