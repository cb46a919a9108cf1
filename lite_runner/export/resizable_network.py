"""The network of the `resizable` layout, of the few primitives that MindSpore Lite 2.0.0 runs well.

Lite 2.0.0 keeps no state between runs, and computes some operators wrong; so the cache goes in
and comes out, norms and activations are composed, and everything that depends on positions is an
input (lite_runner.export.resizable_inputs tells them, and the shapes).
"""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from lite_runner.config.model import ModelConfig
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


class Norm(nn.Cell):
    """RMSNorm, or with a `beta` LayerNorm, over the last axis of [n, hidden].

    Composed: Lite's own LayerNorm is wrong with several threads, its Rsqrt in the fourth digit.
    """

    def __init__(self, eps: float, gamma: Array, beta: Array | None = None) -> None:
        super().__init__()
        self.gamma = parameter(gamma, "gamma")
        self.beta = None if beta is None else parameter(beta, "beta")
        self.eps = _constant(eps)
        self.mean, self.sqrt = ops.ReduceMean(keep_dims=True), ops.Sqrt()
        self.add, self.sub, self.mul, self.div = ops.Add(), ops.Sub(), ops.Mul(), ops.RealDiv()

    def construct(self, x: Tensor) -> Tensor:
        if self.beta is not None:
            x = self.sub(x, self.mean(x, -1))
        scale = self.sqrt(self.add(self.mean(self.mul(x, x), -1), self.eps))
        y = self.mul(self.div(x, scale), self.gamma)
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

    def __init__(self, model: ModelConfig, qkv: Dense, out: Dense) -> None:
        super().__init__()
        self.qkv, self.out = qkv, out
        self.rotary = model.family == "llama"
        self.head_dim = model.head_dim
        self.by_head = (-1, model.num_heads + 2 * model.n_kv_heads, model.head_dim)
        self.merged = (-1, model.num_heads * model.head_dim)
        self.reshape, self.gather = ops.Reshape(), ops.Gather()
        self.split, self.swap, self.join = ops.Split(-1, 2), ops.Concat(-1), ops.Concat(2)
        self.mul, self.add, self.softmax = ops.Mul(), ops.Add(), ops.Softmax(-1)
        self.scores, self.mix = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()

    def construct(
        self, x: Tensor, past_k: Tensor, past_v: Tensor, rows: tuple[Tensor, ...], place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_rows, k_rows, v_rows, merge_rows, bias = rows
        x = self.qkv(x)
        if self.rotary:  # of the values too: their cosine is 1 and their sine 0
            x = self.reshape(x, self.by_head)
            left, right = self.split(x)
            x = self.add(self.mul(x, place[0]), self.mul(self.swap((right, left)), place[1]))
        x = self.reshape(x, (-1, self.head_dim))
        q, k, v = self.gather(x, q_rows, 0), self.gather(x, k_rows, 0), self.gather(x, v_rows, 0)
        scores = self.scores(q, self.join((k, past_k)))
        mixed = self.mix(self.softmax(self.add(scores, bias)), self.join((v, past_v)))
        mixed = self.gather(self.reshape(mixed, (-1, self.head_dim)), merge_rows, 0)
        return self.out(self.reshape(mixed, self.merged)), k, v


class Block(nn.Cell):
    """Attention and a feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: ModelConfig, weights: Weights, index: int) -> None:
        super().__init__()
        llama = model.family == "llama"
        places = {"llama": "model.layers", "bloom": "blocks", "gpt2": "backbone.blocks"}
        prefix = f"{places[model.family]}.{index}"

        def take(name: str) -> Array:
            return weights(f"{prefix}.{name}")

        def norm(name: str) -> Norm:
            if llama:
                return Norm(model.norm_eps, take(f"{name}.weight"))
            return Norm(model.norm_eps, take(f"{name}.gamma"), take(f"{name}.beta"))

        def together(names: list[str], has_bias: bool, scale: float = 1.0) -> Dense:
            """One product in place of several; the first of them is scaled."""
            parts = [take(f"{name}.weight") for name in names]
            biases = [take(f"{name}.bias") for name in names] if has_bias else []
            for part in (parts, biases):
                part[:1] = [values * np.float32(scale) for values in part[:1]]
            return Dense(np.concatenate(parts), np.concatenate(biases) if has_bias else None)

        def projection(name: str) -> Dense:
            return Dense(take(f"{name}.weight").T, take(f"{name}.bias"))

        scale = model.head_dim**-0.5
        if llama:
            self.attention_norm = norm("attention_norm")
            names = [f"attention.w{kind}" for kind in "qkv"]
            qkv = together(names, model.qkv_has_bias, scale)
            self.attention = CachedAttention(model, qkv, Dense(take("attention.wo.weight")))
            self.norm = norm("ffn_norm")
            self.up = together(["feed_forward.w1", "feed_forward.w3"], False)
            self.activation: nn.Cell = SwiGLU()
            self.down = Dense(take("feed_forward.w2.weight"))
        else:
            self.attention_norm = norm("layernorm1")
            qkv = together([f"attention.dense{kind}" for kind in "123"], True, scale)
            self.attention = CachedAttention(model, qkv, projection("attention.projection"))
            self.norm = norm("layernorm2")
            self.up = projection("output.mapping")
            self.activation = GELU()
            self.down = projection("output.projection")
        self.add = ops.Add()

    def construct(
        self, x: Tensor, past_k: Tensor, past_v: Tensor, rows: tuple[Tensor, ...], place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        h, k, v = self.attention(self.attention_norm(x), past_k, past_v, rows, place)
        x = self.add(x, h)
        return self.add(x, self.down(self.activation(self.up(self.norm(x))))), k, v


class ResizableNetwork(nn.Cell):
    """Inputs and outputs: see lite_runner.export.resizable_inputs."""

    def __init__(self, model: ModelConfig, weights: Weights) -> None:
        super().__init__()

        def norm(name: str) -> Norm:
            return Norm(model.norm_eps, weights(f"{name}.gamma"), weights(f"{name}.beta"))

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
            self.norm = Norm(model.norm_eps, weights("model.norm_out.weight"))
            if not model.tie_word_embeddings:
                self.head = parameter(weights("lm_head.weight"), "head")
        else:
            self.norm = norm("ln_f" if model.family == "bloom" else "backbone.layernorm")
        self.places = {"llama": 2, "gpt2": 1, "bloom": 0}[model.family]
        self.gather, self.add, self.matmul = ops.Gather(), ops.Add(), ops.MatMul(transpose_b=True)

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
    ) -> tuple[Tensor, ...]:
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
        return (self.matmul(x, self.table if self.head is None else self.head), *new)
