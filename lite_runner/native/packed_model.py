"""Packs a described model's layers for the native kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from lite_runner.architectures import by_expert, by_role, custom_network, limits, spec
from lite_runner.architectures.naming import HEAD, Part, Role
from lite_runner.architectures.positions import alibi_slopes
from lite_runner.native import matrices, packing
from lite_runner.native.layout import Block, Floats, Layout, Norm, Room, aligned
from lite_runner.native.lora_pool import LoraSize, PoolLayout, Target
from lite_runner.native.matrices import Weight
from lite_runner.native.structs import MOST_HEAD_DIM, Activation
from lite_runner.records import dataclass

_INWARD: tuple[Role, ...] = ("query", "key", "value")
_EXPERTS: tuple[Role, ...] = ("expert_gate", "expert_down", "expert_up")  # as they are read


def unsupported(model: spec.Decoder) -> list[str]:
    """Why the native kernels do not support a model; empty if they do."""
    if custom_network(model) is not None:
        return [f"{model.architecture} has a custom network"]
    reasons = limits.unsupported(model)
    if model.head_dim > MOST_HEAD_DIM:
        reasons.append(f"head_dim is {model.head_dim}, above {MOST_HEAD_DIM}")
    if model.embedding_scale != 1 and (model.learned_positions or model.embedding_norm):
        reasons.append("embeddings are scaled before positions or a norm")
    return reasons


# The kernels know no embedding scale: hidden states are kept divided by it. Norms undo that, with
# an epsilon that fits, and what is added to the hidden states is divided too.


def norm_of_hidden(model: spec.Decoder, norm: spec.Norm | None) -> spec.Norm | None:
    """The norm of hidden states as the kernels have them."""
    return None if norm is None else replace(norm, eps=norm.eps / model.embedding_scale**2)


def residual_scale(model: spec.Decoder, block: spec.Block) -> float:
    """Scale of what a layer adds to hidden states as the kernels have them."""
    return block.residual_scale / model.embedding_scale


def normed_residual(model: spec.Decoder, block: spec.Block) -> float | None:
    """Scale of the normed hidden states that a layer adds to, as the kernels have them."""
    if block.normed_residual is None:
        return None
    return block.normed_residual / model.embedding_scale


def is_general(model: spec.Decoder, block: spec.Block) -> bool:
    """Whether a block's layers have norms or scales that plain ones have not."""
    attention = block.attention
    return (
        block.norm is None
        or block.post_norm is not None
        or residual_scale(model, block) != 1
        or attention.scale is not None
        or attention.softcap is not None
        or not attention.qk_norm_by_head
        or block.feed_forward.activation is not None
        or len(model.rotaries) > 1
        or block.normed_residual is not None
        or block.parallel
        or model.prefix is not None
    )


def score_scale(attention: spec.Attention) -> float:
    """Scale of attention scores."""
    return attention.head_dim**-0.5 if attention.scale is None else attention.scale


def rope_columns(model: spec.Decoder, attention: spec.Attention) -> tuple[int, int]:
    """Width of a row of the rotary table, and where a layer's cos and sin begin in it: the model's
    different rotary positions lie side by side. (0, 0): the layer has none."""
    if attention.rotary is None:
        return 0, 0
    index = model.rotaries.index(attention.rotary)
    return len(model.rotaries) * model.head_dim, index * model.head_dim


_ACTIVATIONS: dict[spec.Activation, Activation] = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_exact": Activation.GELU_EXACT,
}


def activation(feed_forward: spec.FeedForward) -> Activation:
    """As the kernels have it."""
    return _ACTIVATIONS[feed_forward.function]


class Weights(Protocol):
    """Source of a model's tensors by canonical name; each can be taken once."""

    def matrix(self, name: str) -> Weight:
        """Weight [out, in] of a linear layer, the embedding or the head."""
        ...

    def vector(self, name: str) -> Floats:
        """Any other tensor."""
        ...


@dataclass(frozen=True)
class Packed:
    """A packed layer and the layout of its adapter pool (None: not targeted)."""

    block: Block
    adapters: PoolLayout | None
    since: int = 1  # format version that introduced its matrices


def pack(
    model: spec.Decoder,
    weights: Weights,
    lora: LoraSize | None = None,
    *,
    rounded_input: bool = False,
    dequantize: bool = False,
) -> list[Packed]:
    """The layers of a model that is not `unsupported`, in the order of computation, taking its
    weights layer by layer.

    `rounded_input` and `dequantize`: see matrices.matrix.
    """
    return list(
        packed_layers(model, weights, lora, rounded_input=rounded_input, dequantize=dequantize)
    )


def packed_layers(
    model: spec.Decoder,
    weights: Weights,
    lora: LoraSize | None = None,
    *,
    rounded_input: bool = False,
    dequantize: bool = False,
    room: Room = aligned,
) -> Iterator[Packed]:
    """The same, one after the other: embedding, attention and feed-forward of each block, head.
    Each is packed in a `room` of its own."""
    packer = _Packer(model, weights, PoolLayouts(model, lora), rounded_input, dequantize, room)
    yield packer.embedding()
    for layer, block in enumerate(model.blocks):
        yield packer.attention(layer, block)
        yield packer.feed_forward(layer, block)
    yield packer.head()


class PoolLayouts:
    """Layouts of the adapter pools of a model's layers; None: not targeted."""

    def __init__(self, model: spec.Decoder, lora: LoraSize | None) -> None:
        """`lora` None: no adapters."""
        self._model, self._lora = model, lora
        self._parameters = by_role(model)

    def every(self) -> list[PoolLayout | None]:
        """In the order of `packed_layers`."""
        blocks = enumerate(self._model.blocks)
        pairs = [(self.attention(i, block), self.feed_forward(i, block)) for i, block in blocks]
        return [self.embedding(), *(one for pair in pairs for one in pair), self.head()]

    def embedding(self) -> PoolLayout | None:
        model = self._model
        name = self._parameters["embedding", None, "weight"].name
        return self._layout([Target(name, model.vocab_size, model.hidden_size, looked_up=True)])

    def attention(self, layer: int, block: spec.Block) -> PoolLayout | None:
        parts, hidden = block.attention, self._model.hidden_size
        queries, keys = parts.heads * parts.head_dim, parts.kv_heads * parts.head_dim
        return self._layout(
            [
                self._target("query", layer, hidden, queries),
                self._target("key", layer, hidden, keys),
                self._target("value", layer, hidden, keys),
                self._target("attention_out", layer, queries, hidden),
            ]
        )

    def feed_forward(self, layer: int, block: spec.Block) -> PoolLayout | None:
        parts, hidden = block.feed_forward, self._model.hidden_size
        if parts.experts is not None:  # which adapters do not target
            return None
        return self._layout(
            [
                self._target("gate", layer, hidden, parts.width) if parts.gated else None,
                self._target("up", layer, hidden, parts.width),
                self._target("down", layer, parts.width, hidden),
            ]
        )

    def head(self) -> PoolLayout | None:
        model = self._model  # adapters target a tied head by this name too
        return self._layout([Target(f"{HEAD}.weight", model.hidden_size, model.vocab_size)])

    def _target(self, role: Role, layer: int, inputs: int, outputs: int) -> Target:
        return Target(self._parameters[role, layer, "weight"].name, inputs, outputs)

    def _layout(self, targets: Sequence[Target | None]) -> PoolLayout | None:
        if self._lora is None:
            return None
        size = self._lora
        targeted = [one if one and one.name in size.targets else None for one in targets]
        if not any(targeted):
            return None
        return PoolLayout(size.rank, tuple(targeted), size.bfloat16)


class _Packer:
    """Takes a model's weights by role and packs them."""

    def __init__(
        self,
        model: spec.Decoder,
        weights: Weights,
        layouts: PoolLayouts,
        rounded_input: bool,
        dequantize: bool,
        room: Room,
    ) -> None:
        self._model, self._weights, self._layouts = model, weights, layouts
        self._rounded_input, self._dequantize, self._room = rounded_input, dequantize, room
        self._parameters, self._experts = by_role(model), by_expert(model)

    def embedding(self) -> Packed:
        model, name = self._model, self._name("embedding")
        positions = None
        if model.learned_positions:
            positions = self._weights.vector(self._name("positions"))
        norm = None
        if model.embedding_norm is not None:
            norm = self._norm(model.embedding_norm, "embedding_norm")
        layout = self._layouts.embedding()
        table = self._packed(self._weights.matrix(name))
        block = packing.embedding(table, positions, norm, layout, hidden=model.hidden_size)
        return Packed(block.block(self._room), layout, block.since)

    def attention(self, layer: int, block: spec.Block) -> Packed:
        parts, hidden = block.attention, self._model.hidden_size
        layout = self._layouts.attention(layer, block)
        inward = matrices.stacked([self._matrix(role, layer) for role in _INWARD])
        bias = None
        if parts.qkv_bias:
            bias = np.concatenate([self._bias(role, layer) for role in _INWARD])
        outward = self._matrix("attention_out", layer)
        query_norm = key_norm = None
        if parts.qk_norm is not None:
            query_norm = self._norm(parts.qk_norm, "query_norm", layer)
            key_norm = self._norm(parts.qk_norm, "key_norm", layer)
        general = None
        if residual := self._residual("attention_post_norm", layer, block):
            general = packing.GeneralAttention(
                score_scale(parts),
                residual,
                joint_norm=not parts.qk_norm_by_head,
                softcap=parts.softcap,
                rope=rope_columns(self._model, parts),
                prefix=self._model.prefix is not None,
            )
        packed = packing.attention(
            packing.AttentionShape(
                parts.heads,
                parts.kv_heads,
                parts.head_dim,
                hidden,
                rotary=parts.rotary is not None,
                residual=True,
                window=parts.window,
            ),
            self._packed(inward, bias),
            self._packed(outward, self._bias("attention_out", layer) if parts.out_bias else None),
            self._norm_of_hidden(block.norm, "attention_norm", layer),
            layout,
            slopes=alibi_slopes(parts.heads) if parts.alibi else None,
            qk_norm=(query_norm, key_norm),
            general=general,
        )
        return Packed(packed.block(self._room), layout, packed.since)

    def feed_forward(self, layer: int, block: spec.Block) -> Packed:
        parts, hidden = block.feed_forward, self._model.hidden_size
        if parts.experts is not None:
            return self._mixture(layer, block, parts.experts)
        layout = self._layouts.feed_forward(layer, block)
        up: Weight | matrices.Alternating
        bias: Floats | tuple[Floats, Floats] | None
        if parts.gated:
            up = matrices.Alternating(self._matrix("gate", layer), self._matrix("up", layer))
            bias = (self._bias("gate", layer), self._bias("up", layer)) if parts.bias else None
        else:
            up = self._matrix("up", layer)
            bias = self._bias("up", layer) if parts.bias else None
        upward = self._packed(up, bias)
        down = self._matrix("down", layer)
        residual = self._residual("feed_forward_post_norm", layer, block)
        packed = packing.feed_forward(
            upward,
            self._packed(down, self._bias("down", layer) if parts.bias else None),
            self._norm_of_hidden(block.norm, "feed_forward_norm", layer),
            layout,
            hidden=hidden,
            wide=parts.width,
            gated=parts.gated,
            residual=residual is None or packing.GeneralFeedForward(residual, activation(parts)),
        )
        return Packed(packed.block(self._room), layout, packed.since)

    def _mixture(self, layer: int, block: spec.Block, experts: spec.Experts) -> Packed:
        # The inputs of all experts are rounded alike.
        router = self._weights.vector(self._name("router", layer))
        gates, downs, ups = (
            [self._weights.matrix(one.name) for one in self._experts[role, layer]]
            for role in _EXPERTS
        )
        inward, outward = matrices.alike([*gates, *ups]), matrices.alike(downs)
        pairs = map(matrices.Alternating, inward[: experts.count], inward[experts.count :])
        packed = packing.experts(
            packing.Routing(matrices.matrix(router), experts.chosen, experts.renormalized),
            [self._packed(pair) for pair in pairs],
            [self._packed(down) for down in outward],
            self._norm_of_hidden(block.norm, "feed_forward_norm", layer),
            hidden=self._model.hidden_size,
            wide=block.feed_forward.width,
            general=packing.GeneralFeedForward(
                self._residual_of("feed_forward_post_norm", layer, block),
                activation(block.feed_forward),
            ),
        )
        return Packed(packed.block(self._room), None, packed.since)

    def head(self) -> Packed:
        model = self._model
        matrix = None
        if not model.tie_word_embeddings:
            matrix = self._packed(self._weights.matrix(f"{HEAD}.weight"))
        layout = self._layouts.head()
        norm = self._norm_of_hidden(model.norm, "norm")
        assert norm is not None
        if model.logits_scaling != 1:
            scaling = np.float32(model.logits_scaling)
            beta = None if norm.beta is None else norm.beta / scaling
            norm = Norm(norm.gamma / scaling, beta, norm.epsilon)
        block = packing.head(
            matrix, norm, layout, hidden=model.hidden_size, softcap=model.logits_softcap
        )
        return Packed(block.block(self._room), layout, block.since)

    def _name(self, role: Role, layer: int | None = None, kind: Part = "weight") -> str:
        return self._parameters[role, layer, kind].name

    def _matrix(self, role: Role, layer: int) -> Weight:
        return self._weights.matrix(self._name(role, layer))

    def _bias(self, role: Role, layer: int) -> Floats:
        return self._weights.vector(self._name(role, layer, "bias"))

    def _norm(self, norm: spec.Norm, role: Role, layer: int | None = None) -> Norm:
        gain = self._weights.vector(self._name(role, layer))
        shift = None
        if norm.kind == "layer":
            shift = self._weights.vector(self._name(role, layer, "bias"))
        return Norm(gain, shift, norm.eps)

    def _norm_of_hidden(
        self, norm: spec.Norm | None, role: Role, layer: int | None = None
    ) -> Norm | None:
        scaled = norm_of_hidden(self._model, norm)
        return None if scaled is None else self._norm(scaled, role, layer)

    def _residual(self, role: Role, layer: int, block: spec.Block) -> packing.Residual | None:
        """None: the layer is a plain one."""
        return self._residual_of(role, layer, block) if is_general(self._model, block) else None

    def _residual_of(self, role: Role, layer: int, block: spec.Block) -> packing.Residual:
        norm = None if block.post_norm is None else self._norm(block.post_norm, role, layer)
        normed = normed_residual(self._model, block)
        return packing.Residual(residual_scale(self._model, block), norm, normed, block.parallel)

    def _packed(
        self,
        weight: Weight | matrices.Alternating | matrices.Stacked,
        bias: Floats | tuple[Floats, Floats] | None = None,
    ) -> Layout:
        return matrices.matrix(
            weight, bias, rounded_input=self._rounded_input, dequantize=self._dequantize
        )
