"""The `resizable` layout: one graph for prefill and decode, for MindSpore Lite 2.0.0.

Lite 2.0.0 keeps no state between runs, and some of its operators are wrong; so the cache is an
input and output, norms and activations are composed, and everything that depends on positions is an
input (shapes: lite_runner.mindir.graph_inputs).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from lite_runner.architectures import by_role, spec
from lite_runner.architectures.naming import Role
from lite_runner.architectures.spec import Attention, Decoder
from lite_runner.errors import ConfigError
from lite_runner.mindir.graph_inputs import (
    Shape,
    dynamic_inputs,
    dynamic_outputs,
    inputs_of,
    not_resizable,
    windows_of,
)
from lite_runner.mindir.manifest import Graph, GraphName
from lite_runner.mindir.writer import rewrite_for_lite, write_mindir
from lite_runner.networks.layers import Array, Weights, parameter
from lite_runner.records import dataclass

# Traced for one token, Lite silently computes wrong results for any other number.
TRACED_TOKENS = 2
TRACED_PAST = 4  # small: Lite allocates the traced shape when it loads


def export_resizable(
    model: Decoder, weights: Weights, folder: Path, name: str, *, batch_size: int, seq_length: int
) -> dict[GraphName, Graph]:
    """Write `<name>_graph.mindir` into a folder, and above 1 GB `<name>_variables` beside it.

    It is traced for `batch_size` rows, and can be resized to any number. It does not depend on
    `seq_length` (maximum tokens per row), which only bounds the traced shape. Raises ConfigError
    for a model that `not_resizable` has reasons against.
    """
    if reasons := not_resizable(model):
        raise ConfigError(
            f"the layout resizable does not support {model.architecture}: {'; '.join(reasons)}",
            "export.layout=static_pair",
        )
    network = ResizableNetwork(model, weights)
    shape = Shape(batch_size, TRACED_TOKENS, min(TRACED_PAST, seq_length))
    examples = [Tensor(np.zeros(one.shape, one.dtype)) for one in inputs_of(model, shape)]
    file = write_mindir(network, examples, folder, name, enc_key=None)
    rewrite_for_lite(folder / file)
    return {"model": Graph(file, dynamic_inputs(model), dynamic_outputs(model))}


def _constant(value: float) -> Tensor:
    return Tensor(np.array([value], np.float32))


class Tensors:
    """A model's tensors by role and layer; each can be taken once."""

    def __init__(self, model: Decoder, weights: Weights) -> None:
        self._weights = weights
        self._parameters = by_role(model)

    def __call__(self, role: Role, layer: int | None = None) -> Array:
        """A weight or gain; of a linear layer [out, in]."""
        one = self._parameters[role, layer, "weight"]
        weight = self._weights(one.name)
        return weight.T if one.transposed else weight

    def bias(self, role: Role, layer: int | None = None) -> Array | None:
        """Of a linear layer or a norm; None where it has none."""
        one = self._parameters.get((role, layer, "bias"))
        return None if one is None else self._weights(one.name)


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
    """The affine part of a norm: y * gamma + beta."""

    gamma: Array
    beta: Array | None = None

    def folded_into(self, weight: Array, bias: Array | None) -> tuple[Array, Array | None]:
        """Fold it into the following linear layer [out, in], saving two operators."""
        if self.beta is not None:
            shift = weight @ self.beta
            bias = shift if bias is None else bias + shift
        return weight * self.gamma, bias


class ComposedNorm(nn.Cell):
    """RMSNorm or LayerNorm over the last axis of [n, hidden].

    Composed: Lite's own LayerNorm is wrong with several threads, its Rsqrt in the fourth digit.
    `affine` None: folded into the next layer.
    """

    def __init__(self, norm: spec.Norm, affine: Affine | None = None) -> None:
        super().__init__()
        self.centred = norm.kind == "layer"
        self.gamma = None if affine is None else parameter(affine.gamma, "gamma")
        self.beta = None
        if affine is not None and affine.beta is not None:
            self.beta = parameter(affine.beta, "beta")
        self.eps = _constant(norm.eps)
        self.mean, self.sqrt = ops.ReduceMean(keep_dims=True), ops.Sqrt()
        self.add, self.sub, self.mul, self.div = ops.Add(), ops.Sub(), ops.Mul(), ops.RealDiv()

    def construct(self, x: Tensor) -> Tensor:
        if self.centred:
            x = self.sub(x, self.mean(x, -1))
        y = self.div(x, self.sqrt(self.add(self.mean(self.mul(x, x), -1), self.eps)))
        if self.gamma is not None:
            y = self.mul(y, self.gamma)
        return y if self.beta is None else self.add(y, self.beta)


class HeadNorm(nn.Cell):
    """RMSNorm of each head's query and key, over the last axis of [n, H + 2 * K, D].

    Values pass through unchanged: their squares are multiplied by 0, and they are divided by 1.
    """

    def __init__(self, attention: Attention, eps: float, query: Array, key: Array) -> None:
        """`query`, `key`: gains [D]."""
        super().__init__()
        heads, kv = attention.heads, attention.kv_heads
        value = np.ones_like(key)
        self.gamma = parameter(np.stack([query] * heads + [key] * kv + [value] * kv), "gamma")
        count = [heads + kv, kv]  # heads with and without norm
        self.normed = Tensor(np.repeat([1.0, 0.0], count).astype(np.float32)[:, None])
        self.floor = Tensor(np.repeat([eps, 1.0], count).astype(np.float32)[:, None])
        self.mean, self.sqrt = ops.ReduceMean(keep_dims=True), ops.Sqrt()
        self.add, self.mul, self.div = ops.Add(), ops.Mul(), ops.RealDiv()

    def construct(self, x: Tensor) -> Tensor:
        # Masked before the mean: Lite would fuse a product and a sum, and fail to infer its shape.
        squares = self.mean(self.mul(x, self.mul(x, self.normed)), -1)
        return self.mul(self.div(x, self.sqrt(self.add(squares, self.floor))), self.gamma)


class SwiGLU(nn.Cell):
    """silu(gate) * up of [n, 2 * width], the gate in the first half."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.sigmoid, self.mul = ops.Split(-1, 2), ops.Sigmoid(), ops.Mul()

    def construct(self, x: Tensor) -> Tensor:
        gate, up = self.split(x)
        return self.mul(self.mul(gate, self.sigmoid(gate)), up)


class SigmoidGELU(nn.Cell):
    """Tanh GELU, as x * sigmoid(2 u): Lite's own GeLU is off by 5e-4, its Tanh by 2e-5."""

    def __init__(self) -> None:
        super().__init__()
        self.add, self.mul, self.sigmoid = ops.Add(), ops.Mul(), ops.Sigmoid()
        self.cubic, self.one = _constant(0.044715), _constant(1.0)
        self.scale = _constant(2 * (2 / np.pi) ** 0.5)

    def construct(self, x: Tensor) -> Tensor:
        inner = self.mul(x, self.add(self.mul(self.mul(x, x), self.cubic), self.one))
        return self.mul(x, self.sigmoid(self.mul(inner, self.scale)))


class CachedAttention(nn.Cell):
    """Attention over new and cached keys, [n, hidden] -> [n, hidden]; heads are gathered by row."""

    def __init__(
        self, attention: Attention, qkv: Dense, out: Dense, head_norm: HeadNorm | None
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.head_norm = qkv, out, head_norm
        self.rotary = attention.rotary is not None
        self.head_dim = attention.head_dim
        self.by_head = (-1, attention.heads + 2 * attention.kv_heads, attention.head_dim)
        self.merged = (-1, attention.heads * attention.head_dim)
        half = attention.head_dim // 2
        swapped = np.concatenate([np.arange(half, 2 * half), np.arange(half)])
        self.swapped = Tensor(swapped.astype(np.int32))  # swaps a head's halves
        self.reshape, self.gather, self.join = ops.Reshape(), ops.Gather(), ops.Concat(2)
        self.mul, self.add, self.softmax = ops.Mul(), ops.Add(), ops.Softmax(-1)
        self.scores, self.mix = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()

    def construct(
        self, x: Tensor, past_k: Tensor, past_v: Tensor, rows: tuple[Tensor, ...], positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_rows, k_rows, v_rows, merge_rows, bias = rows
        x = self.qkv(x)
        if self.rotary or self.head_norm is not None:
            x = self.reshape(x, self.by_head)
        if self.head_norm is not None:
            x = self.head_norm(x)
        if self.rotary:  # values too, with cos 1 and sin 0
            rotated = self.mul(self.gather(x, self.swapped, 2), positions[1])
            x = self.add(self.mul(x, positions[0]), rotated)
        x = self.reshape(x, (-1, self.head_dim))
        q, k, v = self.gather(x, q_rows, 0), self.gather(x, k_rows, 0), self.gather(x, v_rows, 0)
        scores = self.scores(q, self.join((k, past_k)))
        mixed = self.mix(self.softmax(self.add(scores, bias)), self.join((v, past_v)))
        mixed = self.gather(self.reshape(mixed, (-1, self.head_dim)), merge_rows, 0)
        return self.out(self.reshape(mixed, self.merged)), k, v


class ResizableBlock(nn.Cell):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(self, model: Decoder, take: Tensors, layer: int) -> None:
        super().__init__()
        block = model.blocks[layer]
        attention = block.attention

        def affine_of(role: Role) -> Affine:
            return Affine(take(role, layer), take.bias(role, layer))

        def fused(roles: list[Role], affine: Affine, scale: float = 1.0) -> Dense:
            """Fused projection of several roles after a norm; the first one is scaled."""
            parts = [take(role, layer) for role in roles]
            biases = [bias for role in roles if (bias := take.bias(role, layer)) is not None]
            for part in (parts, biases):
                part[:1] = [values * np.float32(scale) for values in part[:1]]
            bias = np.concatenate(biases) if biases else None
            return Dense(*affine.folded_into(np.concatenate(parts), bias))

        def dense(role: Role) -> Dense:
            return Dense(take(role, layer), take.bias(role, layer))

        scale, head_norm = attention.head_dim**-0.5, None
        if attention.qk_norm is not None:  # a norm would cancel a scale of its input
            gain = take("query_norm", layer) * np.float32(scale)
            key = take("key_norm", layer)
            scale, head_norm = 1.0, HeadNorm(attention, attention.qk_norm.eps, gain, key)
        assert block.norm is not None  # see not_resizable
        self.attention_norm, self.norm = ComposedNorm(block.norm), ComposedNorm(block.norm)
        qkv = fused(["query", "key", "value"], affine_of("attention_norm"), scale)
        self.attention = CachedAttention(attention, qkv, dense("attention_out"), head_norm)
        gated = block.feed_forward.gated
        self.up = fused(["gate", "up"] if gated else ["up"], affine_of("feed_forward_norm"))
        self.activation: nn.Cell = SwiGLU() if gated else SigmoidGELU()
        self.down = dense("down")
        self.add = ops.Add()

    def construct(
        self, x: Tensor, past_k: Tensor, past_v: Tensor, rows: tuple[Tensor, ...], positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        h, k, v = self.attention(self.attention_norm(x), past_k, past_v, rows, positions)
        x = self.add(x, h)
        return self.add(x, self.down(self.activation(self.up(self.norm(x))))), k, v


class ResizableNetwork(nn.Cell):
    """Inputs and outputs: see lite_runner.mindir.graph_inputs."""

    def __init__(self, model: Decoder, weights: Weights) -> None:
        super().__init__()

        take = Tensors(model, weights)

        def norm(described: spec.Norm, role: Role) -> ComposedNorm:
            return ComposedNorm(described, Affine(take(role), take.bias(role)))

        self.embedding_norm = self.position_table = self.head = None
        self.table: Parameter = parameter(take("embedding"), "table")
        if model.learned_positions:
            self.position_table = parameter(take("positions"), "position_table")
        if model.embedding_norm is not None:
            self.embedding_norm = norm(model.embedding_norm, "embedding_norm")
        self.blocks = nn.CellList(
            [ResizableBlock(model, take, at) for at in range(model.num_layers)]
        )
        self.norm = None if model.norm is None else norm(model.norm, "norm")
        if not model.tie_word_embeddings:
            self.head = parameter(take("head"), "head")
        windows = windows_of(model)
        self.biases = len(windows)
        self.bias_of = [windows.index(window) for window in model.windows]  # of each layer
        position_inputs = (2 if model.rotary is not None else 0) + int(model.learned_positions)
        self.before_cache = self.biases + position_inputs
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
        *rest: Tensor,
    ) -> tuple[Tensor, Tensor]:
        positions = rest[self.biases : self.before_cache]
        x = self.gather(self.table, tokens, 0)
        if self.position_table is not None:
            x = self.add(x, self.gather(self.position_table, positions[-1], 0))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        new: tuple[Tensor, ...] = ()
        for index, block in enumerate(self.blocks):
            rows = (q_rows, k_rows, v_rows, merge_rows, rest[self.bias_of[index]])
            at = self.before_cache + 2 * index
            x, k, v = block(x, rest[at], rest[at + 1], rows, positions)
            new += (k, v)
        x = self.gather(x, last_rows, 0)
        if self.norm is not None:
            x = self.norm(x)
        logits = self.matmul(x, self.table if self.head is None else self.head)
        return logits, self.stack(new)  # one output: each costs Lite time, however small
