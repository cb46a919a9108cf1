"""The layers of each family, packed for our own operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.positions import alibi_slopes
from lite_runner.architectures.spec import Decoder
from lite_runner.kernels import packing
from lite_runner.kernels.adapters import PoolLayout, Target
from lite_runner.kernels.packing import Block, Layout, Norm, Weight
from lite_runner.models.lora import LoraSize


class FusedWeights(Protocol):
    """Gives the tensors of a model, each once, by their MindFormers names."""

    def matrix(self, name: str) -> Weight:
        """The weight of a linear layer, the embedding or the head [out, in]."""
        ...

    def vector(self, name: str) -> NDArray[np.float32]:
        """Any other tensor."""
        ...


@dataclass(frozen=True)
class Packed:
    """A layer's bytes, and where its adapters are; None: it takes none."""

    block: Block
    adapters: PoolLayout | None


@dataclass(frozen=True)
class PackedModel:
    """All layers of a model; a block is its attention and its feed-forward layer."""

    embedding: Packed
    blocks: list[tuple[Packed, Packed]]
    head: Packed


class Packer:
    """Takes a model's weights and packs them."""

    def __init__(
        self,
        config: Decoder,
        weights: FusedWeights,
        lora: LoraSize | None,
        *,
        integer_input: bool,
        widen: bool,
    ) -> None:
        """`widen`: integers that the weights have become float32 here."""
        self._config, self._weights, self._lora = config, weights, lora
        self._integer_input, self._widen = integer_input, widen
        self._hidden, self._wide = config.hidden_size, config.intermediate_size
        self._heads = (config.num_heads, config.n_kv_heads, config.head_dim)

    def pack(self) -> PackedModel:
        """Every layer, in the order of the checkpoint."""
        return self._llama() if self._config.family == "llama" else self._gpt()

    def _llama(self) -> PackedModel:
        config = self._config
        embedding = self._embedding("model.tok_embeddings.embedding_weight", None, None)
        blocks = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}"
            attention = [f"{prefix}.attention.{name}" for name in ("wq", "wk", "wv", "wo")]
            feed_forward = [f"{prefix}.feed_forward.{name}" for name in ("w1", "w3", "w2")]
            inward = attention[:3]
            bias = self._joined(inward) if config.attention.qkv_bias else None
            stacked = packing.stacked([self._matrix(name) for name in inward])
            outward = self._packed(self._matrix(attention[3]))
            first = self._attention(
                attention, stacked, bias, outward, self._rms(f"{prefix}.attention_norm")
            )
            gate, up = (self._matrix(name) for name in feed_forward[:2])
            upward = self._packed(packing.Alternating(gate, up))
            down = self._packed(self._matrix(feed_forward[2]))
            second = self._feed_forward(feed_forward, upward, down, self._rms(f"{prefix}.ffn_norm"))
            blocks.append((first, second))
        return PackedModel(embedding, blocks, self._head(self._rms("model.norm_out")))

    def _gpt(self) -> PackedModel:
        """BLOOM and GPT-2."""
        bloom = self._config.family == "bloom"
        root = "" if bloom else "backbone."
        positions = None
        table = f"{root}embedding.word_embedding.embedding_table"
        if not bloom:
            positions = self._weights.vector(f"{root}embedding.position_embedding.embedding_table")
        norm = self._layer_norm("embedding.norm") if bloom else None
        embedding = self._embedding(table, positions, norm)
        blocks = []
        for index in range(self._config.num_layers):
            prefix = f"{root}blocks.{index}"
            names = ("dense1", "dense2", "dense3", "projection")
            attention = [f"{prefix}.attention.{name}" for name in names]
            mapping, projection = f"{prefix}.output.mapping", f"{prefix}.output.projection"
            stacked = packing.stacked([self._matrix(name) for name in attention[:3]])
            first = self._attention(
                attention,
                stacked,
                self._joined(attention[:3]),
                self._dense(attention[3]),
                self._layer_norm(f"{prefix}.layernorm1"),
            )
            second = self._feed_forward(
                [None, mapping, projection],
                self._dense(mapping),
                self._dense(projection),
                self._layer_norm(f"{prefix}.layernorm2"),
            )
            blocks.append((first, second))
        last = self._layer_norm("ln_f" if bloom else "backbone.layernorm")
        return PackedModel(embedding, blocks, self._head(last))

    def _embedding(
        self, name: str, positions: NDArray[np.float32] | None, norm: Norm | None
    ) -> Packed:
        table = self._weights.matrix(name)
        vocab, hidden = table.shape
        layout = self._layout([Target(name, vocab, hidden, looked_up=True)])
        block = packing.embedding(self._packed(table), positions, norm, layout, hidden=hidden)
        return Packed(block.block(), layout)

    def _attention(
        self,
        names: list[str],
        inward: Weight,
        bias: NDArray[np.float32] | None,
        outward: Layout,
        norm: Norm,
    ) -> Packed:
        config, hidden = self._config, self._hidden
        queries, keys = (count * config.head_dim for count in self._heads[:2])
        shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        layout = self._layout(
            [Target(f"{name}.weight", *shape) for name, shape in zip(names, shapes, strict=True)]
        )
        bloom = config.family == "bloom"
        block = packing.attention(
            self._heads,
            self._packed(inward, bias),
            outward,
            norm,
            layout,
            hidden=hidden,
            rotary=config.family == "llama",
            residual=True,
            slopes=alibi_slopes(config.num_heads) if bloom else None,
        )
        return Packed(block.block(), layout)

    def _feed_forward(
        self, names: list[str | None] | list[str], up: Layout, down: Layout, norm: Norm
    ) -> Packed:
        """`names` of gate, up and down; without a gate the first is None."""
        hidden, wide = self._hidden, self._wide
        shapes = [(hidden, wide), (hidden, wide), (wide, hidden)]
        layout = self._layout(
            [
                Target(f"{name}.weight", *shape) if name else None
                for name, shape in zip(names, shapes, strict=True)
            ]
        )
        block = packing.feed_forward(
            up,
            down,
            norm,
            layout,
            hidden=hidden,
            wide=wide,
            gated=names[0] is not None,
            residual=True,
        )
        return Packed(block.block(), layout)

    def _head(self, norm: Norm) -> Packed:
        name, matrix = "lm_head.weight", None
        if not self._config.tie_word_embeddings:
            matrix = self._packed(self._weights.matrix(name))
        layout = self._layout([Target(name, self._hidden, self._config.vocab_size)])
        block = packing.head(matrix, norm, layout, hidden=self._hidden)
        return Packed(block.block(), layout)

    def _layout(self, targets: list[Target | None] | list[Target]) -> PoolLayout | None:
        """The pool of a layer, for those of its matrices that any adapter changes."""
        if self._lora is None:
            return None
        size = self._lora
        changed = [one if one and one.name in size.targets else None for one in targets]
        if not any(changed):
            return None
        return PoolLayout(size.rank, tuple(changed), size.bfloat16)

    def _matrix(self, name: str) -> Weight:
        return self._weights.matrix(f"{name}.weight")

    def _dense(self, name: str) -> Layout:
        return self._packed(self._matrix(name), self._weights.vector(f"{name}.bias"))

    def _packed(
        self, weight: Weight | packing.Alternating, bias: NDArray[np.float32] | None = None
    ) -> Layout:
        return packing.matrix(weight, bias, integer_input=self._integer_input, widen=self._widen)

    def _joined(self, names: list[str]) -> NDArray[np.float32]:
        return np.concatenate([self._weights.vector(f"{name}.bias") for name in names])

    def _rms(self, name: str) -> Norm:
        return Norm(self._weights.vector(f"{name}.weight"), None, self._config.norm_eps)

    def _layer_norm(self, name: str) -> Norm:
        gamma, beta = (self._weights.vector(f"{name}.{kind}") for kind in ("gamma", "beta"))
        return Norm(gamma, beta, self._config.norm_eps)
