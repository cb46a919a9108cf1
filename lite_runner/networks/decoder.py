"""The decoder network, built from a model description, and the step graphs compiled from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from lite_runner.architectures import custom_network
from lite_runner.architectures.naming import Role
from lite_runner.architectures.positions import absorbed, alibi_slopes, latent_places
from lite_runner.architectures.spec import Attention as AttentionSpec
from lite_runner.architectures.spec import Decoder, Latent
from lite_runner.networks.layers import (
    Array,
    BuildOptions,
    Embedding,
    Gate,
    LastToken,
    Linear,
    Weights,
    activation_of,
    capped,
    parameter,
)
from lite_runner.networks.lora import Adapters, Lora, LoraStep
from lite_runner.networks.parts import Dense, Parts
from lite_runner.networks.positions import Angles, Prefixes, Rotate, two_positions
from lite_runner.networks.tensor_parallel import Combine, shared_logits, summed

# Parameter names in exported graphs where they differ from the role. They are an ABI: readers of
# graphs, ours included, identify models by them.
_PLAIN: dict[Role, str] = {
    "attention_norm": "norm1",
    "query": "q",
    "key": "k",
    "value": "v",
    "attention_out": "projection",
    "feed_forward_norm": "norm2",
}
_GATED: dict[Role, str] = {
    "query": "wq",
    "key": "wk",
    "value": "wv",
    "attention_out": "wo",
    "feed_forward_norm": "ffn_norm",
    "gate": "w1",
    "down": "w2",
    "up": "w3",
}


class LatentProjections(nn.Cell):
    """Queries and the only key of absorbed latent attention, and outputs of the heads."""

    def __init__(self, parts: Parts, layer: int, given: AttentionSpec, latent: Latent) -> None:
        super().__init__()

        def linear(role: Role, biased: bool) -> Linear:
            bias = parts.tensor(role, layer, "bias") if biased and given.qkv_bias else None
            return Linear(parts.options, parts.tensor(role, layer), bias)

        self.first: Linear | None = None
        self.first_norm: Any = None
        if latent.query_rank is not None:
            self.first = linear("latent_query", True)
            self.first_norm = parts.norm(latent.norm, "latent_query_norm", layer)
        self.query, self.kept = linear("query", False), linear("latent", True)
        self.kept_norm: Any = parts.norm(latent.norm, "latent_norm", layer)
        self.heads, self.dim, self.rank = given.heads, given.head_dim, latent.rank
        values = parts.tensor("latent_values", layer)
        inward, outward = absorbed(latent, given.heads, values)
        self.inward, self.outward = parameter(inward, "inward"), parameter(outward, "outward")
        self.width = given.heads * outward.shape[-1]
        order = np.argsort(latent_places(latent)).astype(np.int32)
        self.order, self.gather = Tensor(order), ops.Gather()
        self.matmul, self.beside = ops.BatchMatMul(), ops.Concat(1)

    def construct(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [n, hidden] -> queries [n, H * D] and the key [n, D]."""
        wide = h
        if self.first is not None:
            wide = self.first_norm(self.first(h))
        q = self.query(wide).reshape(h.shape[0], self.heads, -1).transpose(1, 0, 2)
        q = self.matmul(q, self.inward).transpose(1, 0, 2).reshape(h.shape[0], -1)
        both = self.kept(h)
        both = self.beside((self.kept_norm(both[:, : self.rank]), both[:, self.rank :]))
        return q, self.gather(both, self.order, 1)

    def expanded(self, means: Tensor) -> Tensor:
        """means [n, H * D] -> [n, H * value]."""
        split = means.reshape(-1, self.heads, self.dim).transpose(1, 0, 2)
        out = self.matmul(split, self.outward).transpose(1, 0, 2)
        return out.reshape(-1, self.width)


class BlockCell(nn.Cell):
    """Attention and feed-forward with their norms and residual connections."""

    def __init__(self, parts: Parts, layer: int, inputs: int) -> None:
        """`inputs`: index of this layer's score bias among the step's."""
        super().__init__()
        options, block = parts.options, parts.model.blocks[layer]
        attention, feed_forward = block.attention, block.feed_forward
        whole = summed(options.parallel)

        self.latent: Any = None
        if attention.latent is not None:
            self.latent = LatentProjections(parts, layer, attention, attention.latent)

        def projection(role: Role) -> Any:
            if attention.latent is not None:
                return None
            return parts.dense(role, layer, bias=attention.qkv_bias)

        def dense(role: Role, combine: Combine | None = None) -> Dense:
            biased = feed_forward.biased_down if role == "down" else feed_forward.bias
            return parts.dense(role, layer, bias=biased, combine=combine)

        self.inputs = inputs
        self.head_dim = attention.head_dim
        self.query_width = attention.heads * attention.head_dim
        self.key_width = attention.kv_heads * attention.head_dim
        self.attention_norm = parts.norm(block.norm, "attention_norm", layer)
        self.query, self.key = projection("query"), projection("key")
        self.value = projection("value")
        self.norm_by_head, self.norm_late = attention.qk_norm_by_head, attention.qk_norm_late
        self.query_gain = self.key_gain = None
        if attention.qk_norm_apart:
            # Weights per head are a factor after a norm without weights.
            self.query_norm, self.query_gain = parts.apart(attention, "query_norm", layer)
            self.key_norm, self.key_gain = parts.apart(attention, "key_norm", layer)
        else:
            self.query_norm = parts.norm(attention.qk_norm, "query_norm", layer)
            self.key_norm = parts.norm(attention.qk_norm, "key_norm", layer)
        self.query_scale = 1.0  # besides that of attention
        if attention.scale is not None:
            self.query_scale = attention.scale * attention.head_dim**0.5
        self.residual_scale, self.normed_residual = block.residual_scale, block.normed_residual
        self.parallel = block.parallel
        self.attention_post_norm = parts.norm(block.post_norm, "attention_post_norm", layer)
        self.feed_forward_post_norm = parts.norm(block.post_norm, "feed_forward_post_norm", layer)
        self.sum_norm = parts.norm(block.sum_norm, "sum_norm", layer)
        self.out_norm = parts.norm(block.out_norm, "out_norm", layer)
        rotaries = parts.model.rotaries
        self.rotary = -1 if attention.rotary is None else rotaries.index(attention.rotary)
        self.clip = attention.clip or 0.0  # 0: none
        self.rotate = Rotate(self.query_width, attention.head_dim)
        heads = parts.model.num_heads, parts.model.n_kv_heads
        sinks = parts.tensor("sinks", layer) if attention.sinks else None
        self.attention = parts.layers.attention(
            options, *heads, parts.model.head_dim, attention.softcap, sinks
        )
        self.attention_out = parts.dense(
            "attention_out", layer, bias=attention.out_bias, combine=whole
        )
        self.shared_norm = block.shared_norm
        norm = None if block.shared_norm else block.norm
        self.feed_forward_norm = parts.norm(norm, "feed_forward_norm", layer)
        self.experts: nn.Cell | None = None
        qkv: dict[Role, Dense] = {}
        if self.latent is None:
            qkv = {"query": self.query, "key": self.key, "value": self.value}
        self.qkv_lora = parts.lora(layer, qkv)
        self.out_lora = parts.lora(layer, {"attention_out": self.attention_out})
        if feed_forward.experts is not None:
            self.experts = parts.mixture(feed_forward, layer, whole)
            return
        self.gate = dense("gate") if feed_forward.gated else None
        self.up, self.down = dense("up"), dense("down", whole)
        self.activation, self.gated = activation_of(feed_forward.function), Gate(feed_forward)
        wide: dict[Role, Dense] = {"up": self.up}
        if self.gate is not None:
            wide = {"gate": self.gate, **wide}
        self.wide_lora = parts.lora(layer, wide)
        self.down_lora = parts.lora(layer, {"down": self.down})

    def construct(
        self,
        x: Tensor,
        angles: tuple[tuple[Tensor, Tensor], ...],
        rows: Tensor,
        biases: tuple[Tensor, ...],
        slot: Tensor | None,
        step: LoraStep | None,
    ) -> Tensor:
        """x [n, hidden], `angles` of each of the model's rotary positions, `rows` and `biases` from
        the step's inputs -> [n, hidden]."""
        start = x
        h = x if self.attention_norm is None else self.attention_norm(x)
        shared = h
        x = self.residual(x, h)
        if self.latent is None:
            to_q, to_k, to_v = self.qkv_lora(h, step)
            q, k, v = self.query(h, to_q), self.key(h, to_k), self.value(h, to_v)
        else:
            q, k = self.latent(h)
            v = k
        if not self.norm_late:
            q, k = self.normed(q, k)
        if self.clip > 0.0:
            q, k, v = self.clipped(q), self.clipped(k), self.clipped(v)
        if self.rotary >= 0:
            q, k = self.rotate(q, k, angles[self.rotary])
        if self.norm_late:
            q, k = self.normed(q, k)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        h = self.attention(q, k, v, rows, biases[self.inputs], slot)
        if self.latent is not None:
            h = self.latent.expanded(h)
        h = self.attention_out(h, self.out_lora(h, step)[0])
        x = self.added(x, h if self.attention_post_norm is None else self.attention_post_norm(h))
        x = x if self.sum_norm is None else self.sum_norm(x)
        start = start if self.parallel else x
        if self.shared_norm:
            h = shared
        else:
            h = start if self.feed_forward_norm is None else self.feed_forward_norm(start)
        x = self.residual(x, h)
        h = self.fed_forward(h, step)
        if self.feed_forward_post_norm is not None:
            h = self.feed_forward_post_norm(h)
        x = self.added(x, h)
        return x if self.out_norm is None else self.out_norm(x)

    def clipped(self, x: Tensor) -> Tensor:
        """Between -clip and clip."""
        return ops.maximum(ops.minimum(x, self.clip), -self.clip)

    def residual(self, x: Tensor, normed: Tensor) -> Tensor:
        """The residual that a layer's output is added to."""
        return x if self.normed_residual is None else normed * self.normed_residual

    def added(self, x: Tensor, h: Tensor) -> Tensor:
        """The residual connection."""
        return x + h if self.residual_scale == 1.0 else x + h * self.residual_scale

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Query/key norm: q [n, H * D], k [n, K * D]."""
        if self.query_norm is None or self.key_norm is None:
            return q, k
        if not self.norm_by_head:
            return self.query_norm(q), self.key_norm(k)
        q = self.query_norm(q.reshape(-1, self.head_dim))
        k = self.key_norm(k.reshape(-1, self.head_dim))
        q, k = q.reshape(-1, self.query_width), k.reshape(-1, self.key_width)
        if self.query_gain is not None:
            q, k = q * self.query_gain, k * self.key_gain
        return q, k

    def fed_forward(self, h: Tensor, step: LoraStep | None) -> Tensor:
        """h [n, hidden] -> [n, hidden]."""
        if self.experts is not None:
            return self.experts(h)
        h = self.widened(h, step)
        return self.down(h, self.down_lora(h, step)[0])

    def widened(self, h: Tensor, step: LoraStep | None) -> Tensor:
        """h [n, hidden] -> [n, width], gated or not."""
        if self.gate is None:
            return self.activation(self.up(h, self.wide_lora(h, step)[0]))
        to_gate, to_up = self.wide_lora(h, step)
        return self.gated(self.gate(h, to_gate), self.up(h, to_up))


class DecoderCell(nn.Cell):
    """Tokens and positions -> logits after each row's last token."""

    def __init__(self, model: Decoder, weights: Weights, options: BuildOptions) -> None:
        """`model` is this rank's shard; `weights` maps canonical names to its tensors."""
        super().__init__()
        parts = Parts(model, weights, options)
        cache, parallel = options.cache, options.parallel
        self.embedding = Embedding(options, parts.tensor("embedding"))
        self.position_embedding = self.head = None
        self.embedding_scale, self.logits_scaling = model.embedding_scale, model.logits_scaling
        self.logits_softcap = model.logits_softcap
        if model.learned_positions:  # small: replicated on every rank
            whole = replace(options, parallel=None)
            self.position_embedding = Embedding(
                whole, parts.tensor("positions")[model.position_offset :]
            )
        self.embedding_norm = parts.norm(model.embedding_norm, "embedding_norm")
        length = model.seq_length if cache is None else cache.length
        self.angles = nn.CellList([Angles(model, rotary, length) for rotary in model.rotaries])
        self.prefix = None if model.prefix is None else Prefixes(model.prefix, cache)
        windows = list(dict.fromkeys(model.windows))
        slopes = _slopes(model, options) if model.attention.alibi else None
        heads = model.num_heads, model.n_kv_heads
        self.inputs = nn.CellList(
            [parts.layers.inputs(options, *heads, slopes, window) for window in windows]
        )
        self.last = LastToken()
        self.blocks = nn.CellList(
            [
                BlockCell(parts, layer, windows.index(window))
                for layer, window in enumerate(model.windows)
            ]
        )
        for layer, block in enumerate(self.blocks):
            names = _GATED if model.blocks[layer].feed_forward.gated else _PLAIN
            for role, name in names.items():
                if (cell := getattr(block, role, None)) is not None:
                    cell.update_parameters_name(f"blocks.{layer}.{name}.")
        self.norm = parts.norm(model.norm, "norm")
        if not model.tie_word_embeddings:
            weight = parts.tensor("head")
            bias = parts.tensor("head", kind="bias") if model.head_bias else None
            self.head = Linear(options, weight, bias, shared_logits(parallel, len(weight)))
        shape = (model.vocab_size, model.hidden_size)
        rows = len(self.embedding.weight) if self.head is None else self.head.widths[1]
        table = parts.name("embedding")
        self.adapters = Adapters(options.lora, table, shape, rows, options.dtype)

    def construct(
        self,
        tokens: Tensor,
        position: Tensor,
        length: Tensor,
        slot: Tensor | None,
        adapter_slot: Tensor | None = None,
        every: bool = False,
    ) -> Tensor:
        """tokens [R, T], position, length and adapter slot [R] -> logits [R, vocab], or with
        `every` [n, vocab] after each token."""
        prefix = ends = None
        if self.prefix is not None:
            prefix = self.prefix(tokens, position, length, slot)
            ends = prefix[:, 0]
        positions, rows, bias = self.inputs[0](tokens, position, length, slot, ends)
        biases: tuple[Tensor, ...] = (bias,)
        for inputs in self.inputs[1:]:  # for other windows; positions and rows are the same
            biases = (*biases, inputs(tokens, position, length, slot, ends)[2])
        blocks = None
        rotated = positions
        if prefix is not None:
            rotated, blocks = two_positions(prefix, positions)
        angles: tuple[tuple[Tensor, Tensor], ...] = ()
        for one in self.angles:
            angles = (*angles, one(rotated, length, blocks))
        step = self.adapters(adapter_slot, slot)
        x = self.adapters.embedding(self.embedding(tokens), tokens, step)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x, angles, rows, biases, slot, step)
        if slot is not None and not every:
            x = self.last(x, tokens, position, length)
        if self.norm is not None:
            x = self.norm(x)
        added = self.adapters.head(x, step)[0]
        logits = self.embedding.logits(x, added) if self.head is None else self.head(x, added)
        if self.logits_scaling != 1.0:
            logits = logits / self.logits_scaling
        return capped(logits, self.logits_softcap)


def _slopes(model: Decoder, options: BuildOptions) -> Array:
    """ALiBi slopes of this rank's heads."""
    scale = np.float32(model.attention.alibi_scale)
    if options.parallel is None:
        return alibi_slopes(model.num_heads) * scale
    heads = model.num_heads * options.parallel.ranks.tensor
    return alibi_slopes(heads)[options.parallel.heads(model.num_heads)] * scale


Network = Callable[[Decoder, Weights, BuildOptions], nn.Cell]


def network_of(model: Decoder, weights: Weights, options: BuildOptions) -> nn.Cell:
    if own := custom_network(model):  # may change its blocks
        cell: nn.Cell = own.network(model, weights, options)
        return cell
    network = DecoderCell(model, weights, options)
    _share_graphs(network, model)
    return network


def _share_graphs(network: DecoderCell, model: Decoder) -> None:
    """Compile blocks that differ in the values of their weights alone once, as one graph of these,
    which the front end inlines: 30 layers compile in a third of the time.

    Sets what mindspore.lazy_inline would on a cell whose constructor it decorates.
    """
    for block, given in zip(network.blocks, model.blocks, strict=True):
        # Shapes and types tell which weights are quantized; adapters of other layers may have them.
        shapes = [(name, one.shape, str(one.dtype)) for name, one in block.parameters_and_names()]
        adapted = [cell.order for _, cell in block.cells_and_names() if isinstance(cell, Lora)]
        block.cell_init_args = f"lazy_inline_{given} {shapes} {adapted}"
        block.no_inline = False  # policy="front"


class _StepGraph(nn.Cell):
    """A step graph; the network's parameters keep their names."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network


class Prefill(_StepGraph):
    """Rows of any number of tokens, each with its cache slot."""

    def construct(self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor) -> Tensor:
        return self.network(tokens, position, length, slot)


class Decode(_StepGraph):
    """One token for every slot.

    MindSpore's PagedAttention reads the lengths on the host, from the graph input of exactly this
    name; lengths computed inside the graph are not seen.
    """

    def construct(self, tokens: Tensor, position: Tensor, batch_valid_length: Tensor) -> Tensor:
        return self.network(tokens, position, batch_valid_length, None)


class Score(_StepGraph):
    """Prefill of one row with logits after every token [T, vocab]."""

    def construct(self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor) -> Tensor:
        return self.network(tokens, position, length, slot, None, True)


class LoraScore(_StepGraph):
    """As Score, with the row's adapter slot [1], below 0 the base model."""

    def construct(
        self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor, adapter_slot: Tensor
    ) -> Tensor:
        return self.network(tokens, position, length, slot, adapter_slot, True)


class LoraPrefill(_StepGraph):
    """Prefill of one row with its adapter slot [1], below 0 the base model."""

    def construct(
        self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor, adapter_slot: Tensor
    ) -> Tensor:
        return self.network(tokens, position, length, slot, adapter_slot)


class LoraDecode(_StepGraph):
    """As Decode, with adapter slots [slots], below 0 the base model."""

    def construct(
        self, tokens: Tensor, position: Tensor, batch_valid_length: Tensor, adapter_slot: Tensor
    ) -> Tensor:
        return self.network(tokens, position, batch_valid_length, None, adapter_slot)
