"""The network of the `resizable` layout, of the few primitives that MindSpore Lite 2.0.0 runs well.

Lite 2.0.0 keeps no state between runs, and computes some operators wrong; so the cache goes in
and comes out, norms and activations are composed, and everything that depends on positions is an
input (lite_runner.export.resizable_inputs tells them, and the shapes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from lite_runner.architectures.spec import Decoder
from lite_runner.models.layers import Array, Weights, parameter


def _constant(value: float) -> Tensor:
    return Tensor(np.array([value], np.float32))


class Dense(nn.Cell):
    """[n, in] -> [n, out] by a weight [out, in] and an optional bias [out]."""

    def __init__(self, weight: Array, bias: Array | None = None) -> None:
        super().__init__()
        self.weight = parameter(weight, "weight")
        self.bias = None if bias is None else parameter(bias, "bias")
        self.matmul, self.add = ops.MatMul(transpose_b=True), ops.Add()

    def construct(self, x: Tensor) -> Tensor:
        y = self.matmul(x, self.weight)
        return y if self.bias is None else self.add(y, self.bias)


@dataclass(frozen=True)
class Affine:
    """What follows a norm: y * gamma + beta."""

    gamma: Array
    beta: Array | None = None

    def folded_into(self, weight: Array, bias: Array | None) -> tuple[Array, Array | None]:
        """A linear layer [out, in] behind the norm that does this as well: two operators less."""
        if self.beta is not None:
            shift = weight @ self.beta
            bias = shift if bias is None else bias + shift
        return weight * self.gamma, bias


class Norm(nn.Cell):
    """RMSNorm, or `centred` LayerNorm, over the last axis of [n, hidden].

    Composed: Lite's own LayerNorm is wrong with several threads, its Rsqrt in the fourth digit.
    Without an `affine` that is left to the layer behind it.
    """

    def __init__(self, eps: float, centred: bool, affine: Affine | None = None) -> None:
        super().__init__()
        self.centred = centred
        self.gamma = None if affine is None else parameter(affine.gamma, "gamma")
        self.beta = None
        if affine is not None and affine.beta is not None:
            self.beta = parameter(affine.beta, "beta")
        self.eps = _constant(eps)
        self.mean, self.sqrt = ops.ReduceMean(keep_dims=True), ops.Sqrt()
        self.add, self.sub, self.mul, self.div = ops.Add(), ops.Sub(), ops.Mul(), ops.RealDiv()

    def construct(self, x: Tensor) -> Tensor:
        if self.centred:
            x = self.sub(x, self.mean(x, -1))
        y = self.div(x, self.sqrt(self.add(self.mean(self.mul(x, x), -1), self.eps)))
        if self.gamma is not None:
            y = self.mul(y, self.gamma)
        return y if self.beta is None else self.add(y, self.beta)


class SwiGLU(nn.Cell):
    """silu(gate) * up of [n, 2 * width], the gate in the first half."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.sigmoid, self.mul = ops.Split(-1, 2), ops.Sigmoid(), ops.Mul()

    def construct(self, x: Tensor) -> Tensor:
        gate, up = self.split(x)
        return self.mul(self.mul(gate, self.sigmoid(gate)), up)


class GELU(nn.Cell):
    """The tanh form, as x * sigmoid(2 u): Lite's own GeLU is off by 5e-4, its Tanh by 2e-5."""

    def __init__(self) -> None:
        super().__init__()
        self.add, self.mul, self.sigmoid = ops.Add(), ops.Mul(), ops.Sigmoid()
        self.cubic, self.one = _constant(0.044715), _constant(1.0)
        self.scale = _constant(2 * (2 / np.pi) ** 0.5)

    def construct(self, x: Tensor) -> Tensor:
        inner = self.mul(x, self.add(self.mul(self.mul(x, x), self.cubic), self.one))
        return self.mul(x, self.sigmoid(self.mul(inner, self.scale)))


class CachedAttention(nn.Cell):
    """Attention over new and cached keys, from and to [n, hidden]; the heads' rows are gathered."""

    def __init__(self, model: Decoder, qkv: Dense, out: Dense) -> None:
        super().__init__()
        self.qkv, self.out = qkv, out
        self.rotary = model.family == "llama"
        self.head_dim = model.head_dim
        self.by_head = (-1, model.num_heads + 2 * model.n_kv_heads, model.head_dim)
        self.merged = (-1, model.num_heads * model.head_dim)
        half = model.head_dim // 2
        swapped = np.concatenate([np.arange(half, 2 * half), np.arange(half)])
        self.swapped = Tensor(swapped.astype(np.int32))  # a head's halves change places
        self.reshape, self.gather, self.join = ops.Reshape(), ops.Gather(), ops.Concat(2)
        self.mul, self.add, self.softmax = ops.Mul(), ops.Add(), ops.Softmax(-1)
        self.scores, self.mix = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()

    def construct(
        self, x: Tensor, past_k: Tensor, past_v: Tensor, rows: tuple[Tensor, ...], place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_rows, k_rows, v_rows, merge_rows, bias = rows
        x = self.qkv(x)
        if self.rotary:  # of the values too: their cosine is 1 and their sine 0
            x = self.reshape(x, self.by_head)
            turned = self.mul(self.gather(x, self.swapped, 2), place[1])
            x = self.add(self.mul(x, place[0]), turned)
        x = self.reshape(x, (-1, self.head_dim))
        q, k, v = self.gather(x, q_rows, 0), self.gather(x, k_rows, 0), self.gather(x, v_rows, 0)
        scores = self.scores(q, self.join((k, past_k)))
        mixed = self.mix(self.softmax(self.add(scores, bias)), self.join((v, past_v)))
        mixed = self.gather(self.reshape(mixed, (-1, self.head_dim)), merge_rows, 0)
        return self.out(self.reshape(mixed, self.merged)), k, v


class Block(nn.Cell):
    """Attention and a feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: Decoder, weights: Weights, index: int) -> None:
        super().__init__()
        llama = model.family == "llama"
        places = {"llama": "model.layers", "bloom": "blocks", "gpt2": "backbone.blocks"}
        prefix = f"{places[model.family]}.{index}"

        def take(name: str) -> Array:
            return weights(f"{prefix}.{name}")

        def affine(name: str) -> Affine:
            if llama:
                return Affine(take(f"{name}.weight"))
            return Affine(take(f"{name}.gamma"), take(f"{name}.beta"))

        def together(names: list[str], has_bias: bool, behind: Affine, scale: float = 1.0) -> Dense:
            """One product in place of several, behind a norm; the first of them is scaled."""
            parts = [take(f"{name}.weight") for name in names]
            biases = [take(f"{name}.bias") for name in names] if has_bias else []
            for part in (parts, biases):
                part[:1] = [values * np.float32(scale) for values in part[:1]]
            bias = np.concatenate(biases) if has_bias else None
            return Dense(*behind.folded_into(np.concatenate(parts), bias))

        def projection(name: str) -> tuple[Array, Array]:
            return take(f"{name}.weight").T, take(f"{name}.bias")

        scale = model.head_dim**-0.5
        self.attention_norm = Norm(model.norm_eps, not llama)
        self.norm = Norm(model.norm_eps, not llama)
        if llama:
            names = [f"attention.w{kind}" for kind in "qkv"]
            qkv = together(names, model.attention.qkv_bias, affine("attention_norm"), scale)
            self.attention = CachedAttention(model, qkv, Dense(take("attention.wo.weight")))
            names = ["feed_forward.w1", "feed_forward.w3"]
            self.up = together(names, False, affine("ffn_norm"))
            self.activation: nn.Cell = SwiGLU()
            self.down = Dense(take("feed_forward.w2.weight"))
        else:
            names = [f"attention.dense{kind}" for kind in "123"]
            qkv = together(names, True, affine("layernorm1"), scale)
            out = Dense(*projection("attention.projection"))
            self.attention = CachedAttention(model, qkv, out)
            self.up = Dense(*affine("layernorm2").folded_into(*projection("output.mapping")))
            self.activation = GELU()
            self.down = Dense(*projection("output.projection"))
        self.add = ops.Add()

    def construct(
        self, x: Tensor, past_k: Tensor, past_v: Tensor, rows: tuple[Tensor, ...], place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        h, k, v = self.attention(self.attention_norm(x), past_k, past_v, rows, place)
        x = self.add(x, h)
        return self.add(x, self.down(self.activation(self.up(self.norm(x))))), k, v


class ResizableNetwork(nn.Cell):
    """Inputs and outputs: see lite_runner.export.resizable_inputs."""

    def __init__(self, model: Decoder, weights: Weights) -> None:
        super().__init__()

        def norm(name: str) -> Norm:
            affine = Affine(weights(f"{name}.gamma"), weights(f"{name}.beta"))
            return Norm(model.norm_eps, True, affine)

        self.embedding_norm = self.position_table = self.head = None
        if model.family == "llama":
            table = weights("model.tok_embeddings.embedding_weight")
        elif model.family == "bloom":
            table = weights("embedding.word_embedding.embedding_table")
            self.embedding_norm = norm("embedding.norm")
        else:
            table = weights("backbone.embedding.word_embedding.embedding_table")
            positions = weights("backbone.embedding.position_embedding.embedding_table")
            self.position_table = parameter(positions, "position_table")
        self.table: Parameter = parameter(table, "table")
        self.blocks = nn.CellList([Block(model, weights, at) for at in range(model.num_layers)])
        if model.family == "llama":
            self.norm = Norm(model.norm_eps, False, Affine(weights("model.norm_out.weight")))
            if not model.tie_word_embeddings:
                self.head = parameter(weights("lm_head.weight"), "head")
        else:
            self.norm = norm("ln_f" if model.family == "bloom" else "backbone.layernorm")
        self.places = {"llama": 2, "gpt2": 1, "bloom": 0}[model.family]
        self.gather, self.add, self.matmul = ops.Gather(), ops.Add(), ops.MatMul(transpose_b=True)
        self.stack = ops.Concat(1)

    def construct(
        self,
        tokens: Tensor,
        q_rows: Tensor,
        k_rows: Tensor,
        v_rows: Tensor,
        merge_rows: Tensor,
        last_rows: Tensor,
        bias: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows, place = (q_rows, k_rows, v_rows, merge_rows, bias), rest[: self.places]
        x = self.gather(self.table, tokens, 0)
        if self.position_table is not None:
            x = self.add(x, self.gather(self.position_table, place[0], 0))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        new: tuple[Tensor, ...] = ()
        for index, block in enumerate(self.blocks):
            at = self.places + 2 * index
            x, k, v = block(x, rest[at], rest[at + 1], rows, place)
            new += (k, v)
        x = self.norm(self.gather(x, last_rows, 0))
        logits = self.matmul(x, self.table if self.head is None else self.head)
        return logits, self.stack(new)  # one output: each one costs Lite time, however small
