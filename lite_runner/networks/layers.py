"""Layers of stock operators: linear, norms, attention over a KV cache and its inputs, experts.

Shapes: R rows (cache slots in this step), T new tokens per row, n = R * T, H heads, K key/value
heads, G = H / K heads per group, D head_dim, S positions per slot.

Two kinds of step use the same layers. A *prefill* has rows of T tokens, where T may be a dynamic
shape, with cache slots `slot` [R]; a *decode* has one token for every slot, and `slot` is None.
Hidden states are [n, hidden_size] in both; MindSpore folds the branches at compile time. A prefill
row is padded beyond its length.

Stock CPU operators are slow when they broadcast (20 times a plain product of that size), so
broadcasts are either materialized once per step for all layers, or written as a MatMul.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from lite_runner.architectures.positions import MASKED
from lite_runner.architectures.spec import Activation, FeedForward
from lite_runner.networks.tensor_parallel import (
    Combine,
    TensorParallel,
    shared_embedding,
    shared_logits,
)
from lite_runner.records import dataclass
from lite_runner.weights.lora.adapter import LoraSize

Array = NDArray[np.float32]
Weights = Callable[[str], Array]  # a tensor by its canonical name; each can be taken once


@dataclass(frozen=True)
class CacheSize:
    """Size of the KV cache."""

    slots: int
    length: int  # positions per slot; the last is scratch for padding and inactive slots


@dataclass(frozen=True)
class BuildOptions:
    """Build options of a network, independent of its architecture."""

    cache: CacheSize | None  # None: every step recomputes all positions (use_past=False)
    dtype: ms.Type  # of weights, cache and matrix products; the rest is float32
    parallel: TensorParallel | None = None  # None: no tensor parallelism
    lora: LoraSize | None = None  # None: no adapters
    fused: bool = False  # use Ascend's fused operators: see parts.layers_for
    integer_input: bool = False  # a8w8: the inputs of int8 weights are quantized too
    stored: ms.Type | None = None  # of the matrices' Parameters, if not `dtype`


@runtime_checkable
class Resizable(Protocol):
    """A cell with state sized by the cache."""

    def resize(self, cache: CacheSize) -> None:
        """Reallocate it; the cache's contents are lost, and graphs must be recompiled."""
        ...


def resize(network: nn.Cell, cache: CacheSize) -> None:
    """Reallocate a network's cache, empty; the weights stay."""
    for _, cell in network.cells_and_names():
        if isinstance(cell, Resizable):
            cell.resize(cache)


def weights_by_column(cache: CacheSize | None) -> bool:
    """True if weights are stored [in, out]: twice as fast for 4 to 32 rows, slower for one."""
    return cache is not None and cache.slots > 1


def parameter(values: Array, name: str, dtype: ms.Type = ms.float32) -> Parameter:
    """A Parameter of the given type; float32 shares the array's memory."""
    if dtype == ms.bfloat16:
        return Parameter(Tensor(values).astype(dtype), name, False)
    kind = np.float16 if dtype == ms.float16 else np.float32
    # MindSpore copies unless it gets the only reference to the tensor, by position.
    return Parameter(Tensor.from_numpy(np.ascontiguousarray(values, kind)), name, False)


def make_cache(attention: nn.Cell, shape: tuple[int, ...]) -> None:
    """Set its parameters `keys` and `values` to zeros of this shape."""
    for name in ("keys", "values"):
        # Keep the full name, prefix included, that the network has given it.
        full = getattr(attention, name).name if hasattr(attention, name) else name
        setattr(attention, name, parameter(np.zeros(shape, np.float32), full, attention.dtype))


class Linear(nn.Cell):
    """[n, in] -> [n, out] by a weight [out, in] and an optional bias [out].

    `combine` reduces or gathers the products of several ranks, before the bias is added.
    """

    def __init__(
        self,
        options: BuildOptions,
        weight: Array,
        bias: Array | None = None,
        combine: Combine | None = None,
    ) -> None:
        super().__init__()
        self.by_column = weights_by_column(options.cache)
        self.widths = (weight.shape[1], weight.shape[0])  # [in, out]
        stored = options.stored or options.dtype
        self.weight = parameter(weight.T if self.by_column else weight, "weight", stored)
        self.widens = stored != options.dtype
        self.bias = None if bias is None else parameter(bias, "bias")
        self.dtype = options.dtype
        self.matmul = ops.MatMul(transpose_b=not self.by_column)
        self.add = ops.BiasAdd()
        self.combine = combine

    def resize(self, cache: CacheSize) -> None:
        if self.by_column != weights_by_column(cache):
            self.by_column = not self.by_column
            values = self.weight.astype(ms.float32).asnumpy().T
            self.weight = parameter(values, self.weight.name, self.weight.dtype)
            self.matmul = ops.MatMul(transpose_b=not self.by_column)

    def construct(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """`added` [n, out]: this rank's LoRA delta."""
        weight = self.weight.astype(self.dtype) if self.widens else self.weight
        y = self.matmul(x.astype(self.dtype), weight).astype(ms.float32)
        if added is not None:
            y = y + added
        if self.combine is not None:
            y = self.combine(y)
        return y if self.bias is None else self.add(y, self.bias)


class Embedding(nn.Cell):
    """Embedding table [vocab, hidden], possibly vocabulary-parallel; `logits` is the tied head."""

    def __init__(self, options: BuildOptions, table: Array) -> None:
        super().__init__()
        stored = options.stored or options.dtype
        self.weight = parameter(table, "weight", stored)
        self.widens = stored != options.dtype
        self.dtype = options.dtype
        self.gather = ops.Gather()
        self.matmul = ops.MatMul(transpose_b=True)
        self.shared = shared_embedding(options.parallel, len(table))
        self.whole = shared_logits(options.parallel, len(table))

    def construct(self, indices: Tensor) -> Tensor:
        if self.shared is not None:
            return self.shared(self.weight, indices.reshape(-1))
        return self.gather(self.weight, indices.reshape(-1), 0).astype(ms.float32)

    def logits(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        weight = self.weight.astype(self.dtype) if self.widens else self.weight
        y = self.matmul(x.astype(self.dtype), weight).astype(ms.float32)
        if added is not None:
            y = y + added
        return y if self.whole is None else self.whole(y)


class RMSNorm(nn.Cell):
    """x / sqrt(mean(x^2) + eps) * gamma over the last axis of [n, hidden]."""

    def __init__(self, gamma: Array, eps: float) -> None:
        super().__init__()
        self.gamma = parameter(gamma.reshape(1, -1), "gamma")
        self.eps = eps
        self.mean = ops.ReduceMean(keep_dims=True)
        self.rsqrt = ops.Rsqrt()
        self.outer = ops.MatMul()  # [n, 1] x [1, hidden] in place of two broadcasts

    def construct(self, x: Tensor) -> Tensor:
        return x * self.outer(self.rsqrt(self.mean(x * x, -1) + self.eps), self.gamma)


class LayerNorm(nn.Cell):
    """(x - mean) / sqrt(variance + eps) * gamma + beta over the last axis of [n, hidden]."""

    def __init__(self, gamma: Array, beta: Array, eps: float) -> None:
        super().__init__()
        self.gamma = parameter(gamma, "gamma")
        self.beta = parameter(beta, "beta")
        self.norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=eps)

    def construct(self, x: Tensor) -> Tensor:
        return self.norm(x, self.gamma, self.beta)[0]


class GELU(nn.Cell):
    """Tanh GELU from elementary operators: the stock one takes eight times as long."""

    def construct(self, x: Tensor) -> Tensor:
        inner = x * (x * x * 0.044715 + 1.0) * 0.7978845608028654  # sqrt(2 / pi)
        return x * 0.5 * (ops.tanh(inner) + 1.0)


class ExactGELU(nn.Cell):
    """x times the normal distribution function."""

    def construct(self, x: Tensor) -> Tensor:
        return x * 0.5 * (ops.erf(x * 0.7071067811865476) + 1.0)  # sqrt(1 / 2)


class QuickGELU(nn.Cell):
    """x * sigmoid(1.702 x), MindSpore's FastGeLU."""

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.sigmoid(x * 1.702)


class ReLUSquared(nn.Cell):
    """max(x, 0) squared."""

    def construct(self, x: Tensor) -> Tensor:
        x = ops.relu(x)
        return x * x


class Gate(nn.Cell):
    """f(gate) * up of a gated network."""

    def __init__(self, given: FeedForward) -> None:
        super().__init__()
        self.activation, self.limit = activation_of(given.function), given.limit

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is None:
            return self.activation(gate) * up
        gate = ops.minimum(gate, self.limit)
        up = ops.maximum(ops.minimum(up, self.limit), -self.limit)
        return self.activation(gate) * (up + 1.0)


def activation_of(function: Activation) -> Callable[[Tensor], Tensor]:
    """An elementwise function."""
    functions: dict[Activation, Callable[[Tensor], Tensor]] = {
        "silu": ops.silu,
        "gelu": GELU(),
        "gelu_exact": ExactGELU(),
        "quick_gelu": QuickGELU(),
        "relu": ops.relu,
        "relu_squared": ReLUSquared(),
    }
    return functions[function]


_RANGE, _SCALAR_TO_TENSOR = ops.Range(), ops.ScalarToTensor()


def indices(count: int) -> Tensor:
    """0 to count - 1 as int32; the count may be dynamic. The operators of ops.arange without its
    checks, which take a fifth of the time to compile a prefill."""
    first, end, step = (
        _SCALAR_TO_TENSOR(0, ms.int64),
        _SCALAR_TO_TENSOR(count, ms.int64),
        _SCALAR_TO_TENSOR(1, ms.int64),
    )
    found: Tensor = _RANGE(first, end, step).astype(ms.int32)
    return found


def by_token(rows: Tensor, positions: Tensor) -> Tensor:
    """A value of each row [R] for each of its tokens; positions [n] -> [n]."""
    spread = positions.reshape(rows.shape[0], -1) * 0 + rows.reshape(-1, 1)
    return spread.reshape(-1)


def capped(x: Tensor, softcap: float | None) -> Tensor:
    """Between -softcap and softcap; None: x itself."""
    return x if softcap is None else ops.tanh(x / softcap) * softcap


class StepPositions(nn.Cell):
    """Position ids, cache slots and key positions of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: CacheSize | None = None
        self.slot_index: Tensor | None = None
        self.key_index: Tensor | None = None

    def set_cache(self, cache: CacheSize, positions: int) -> None:
        """`positions`: keys per slot that attention sees."""
        self.cache = cache
        self.slot_index = Tensor(np.arange(cache.slots, dtype=np.int32))
        self.key_index = Tensor(np.arange(positions, dtype=np.int32))

    def positions_of(
        self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [R, T], position and length [R] -> position ids [R, T], the cache slot of each
        row [R] and the position ids of the keys [S]. In a prefill, padding gets the cache's scratch
        position; without a cache all rows start at position 0."""
        positions, owner = position.reshape(-1, 1), self.slot_index
        if slot is not None:
            positions, owner = positions + indices(tokens.shape[1]), slot
            if self.cache is not None:
                real = positions < length.reshape(-1, 1)
                positions = ops.select(real, positions, self.cache.length - 1)
        keys = indices(tokens.shape[1]) if self.cache is None else self.key_index
        return positions, owner, keys


class StepInputs(StepPositions):
    """Position ids, cache rows and score biases of a step, computed once for all layers."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        cache: CacheSize | None,
        slopes: Array | None = None,
        window: int | None = None,
    ) -> None:
        """`slopes` [H]: ALiBi's, one per head. `window`: sliding window in tokens, the current one
        included; None: full."""
        super().__init__()
        self.window = window
        self.kv_heads, self.group = kv_heads, heads // kv_heads
        self.head_index = Tensor(np.arange(kv_heads, dtype=np.int32))
        if cache is not None:
            self.resize(cache)
        self.slopes = None if slopes is None else Tensor(slopes.astype(np.float32))
        self.zero, self.masked = Tensor(0.0, ms.float32), Tensor(MASKED, ms.float32)

    def resize(self, cache: CacheSize) -> None:
        self.set_cache(cache, cache.length)

    def construct(
        self,
        tokens: Tensor,
        position: Tensor,
        length: Tensor,
        slot: Tensor | None,
        prefix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [R, T], position and length [R] -> position ids [n], cache rows to write [n * K],
        score bias [R * K, T * G, S]: 0 or ALiBi's for visible keys, MASKED elsewhere. `prefix` [R]:
        first keys that all tokens of a row see."""
        kv, group, count = self.kv_heads, self.group, tokens.shape[0]
        positions, owner, keys = self.positions_of(tokens, position, length, slot)
        if self.cache is None:
            rows = positions
        else:
            rows = (owner.reshape(-1, 1, 1) * kv + self.head_index) * self.cache.length
            rows = (rows + positions.reshape(count, -1, 1)).reshape(-1)
        positions = positions.reshape(-1)
        distance = keys - positions.reshape(-1, 1)  # [n, S], at most 0 for visible keys
        visible = distance <= 0
        if self.window is not None:
            visible = ops.logical_and(visible, distance > -self.window)
        if prefix is not None:
            ends = by_token(prefix, positions).reshape(-1, 1)
            visible = ops.logical_or(visible, keys < ends)
        bias = ops.select(visible, self.zero, self.masked)
        span = distance.shape[1]
        if self.slopes is None:
            bias = bias.reshape(count, 1, -1, 1, span)
        else:
            bias, distance = (one.reshape(count, 1, -1, 1, span) for one in (bias, distance))
            slopes = self.slopes.reshape(1, kv, 1, group, 1)
            bias = bias + slopes * distance.astype(ms.float32)
        bias = ops.broadcast_to(bias, (count, kv, bias.shape[2], group, span))
        return positions, rows, bias.reshape(count * kv, -1, span)


class LastToken(nn.Cell):
    """Hidden state of each row's last token in a prefill: [n, hidden] -> [R, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.Gather()

    def construct(self, x: Tensor, tokens: Tensor, position: Tensor, length: Tensor) -> Tensor:
        count, step = tokens.shape
        # A chunk of a longer prompt ends before the row's length, a padded row after it.
        last = ops.minimum(ops.maximum(length - position, 1), step) - 1
        return self.gather(x, last + indices(count) * step, 0)


class Attention(nn.Cell):
    """Grouped-query softmax attention over the row's own keys, cached or not.

    With a cache, new keys and values are first written to it in place. It is a Parameter
    [slots * K * S, D]: a step writes K short rows per token, and reads a slot without copying.
    """

    def __init__(
        self,
        options: BuildOptions,
        heads: int,
        kv_heads: int,
        head_dim: int,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> None:
        """`softcap`: of scores; `sinks` [H]: a further score of each head, which adds no value."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.softcap = softcap
        self.group = heads // kv_heads
        self.scale = head_dim**-0.5
        self.dtype = options.dtype
        self.cached = options.cache is not None
        if options.cache is not None:
            self.resize(options.cache)
        self.update, self.gather = ops.ScatterUpdate(), ops.Gather()
        self.scores, self.mix = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()
        self.softmax = ops.Softmax(-1)
        self.sinks = None
        if sinks is not None:
            self.sinks = parameter(sinks.reshape(kv_heads, self.group), "sinks")
            self.beside = ops.Concat(-1)

    def resize(self, cache: CacheSize) -> None:
        self.slots, self.length = cache.slots, cache.length
        make_cache(self, (cache.slots * self.kv_heads * cache.length, self.head_dim))

    def construct(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, bias: Tensor, slot: Tensor | None
    ) -> Tensor:
        """q [n, H * D], k and v [n, K * D], the rest from StepInputs -> [n, H * D]."""
        kv, group, dim = self.kv_heads, self.group, self.head_dim
        q, k, v = (q * self.scale).astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype)
        count = bias.shape[0] // kv  # rows
        if self.cached:
            k = ops.depend(self.keys, self.update(self.keys, rows, k.reshape(-1, dim)))
            v = ops.depend(self.values, self.update(self.values, rows, v.reshape(-1, dim)))
            k, v = self.gather_slots(k, slot), self.gather_slots(v, slot)
        else:
            k = k.reshape(count, -1, kv, dim).transpose(0, 2, 1, 3).reshape(count * kv, -1, dim)
            v = v.reshape(count, -1, kv, dim).transpose(0, 2, 1, 3).reshape(count * kv, -1, dim)
        if slot is None:  # one token per row: the heads are in order already
            q = q.reshape(-1, group, dim)
        else:
            q = q.reshape(count, -1, kv, group * dim).transpose(0, 2, 1, 3)
            q = q.reshape(count * kv, -1, dim)
        scores = capped(self.scores(q, k).astype(ms.float32), self.softcap)
        weights = self.weigh(scores + bias)
        x = self.mix(weights.astype(self.dtype), v).astype(ms.float32)
        if slot is not None:
            x = x.reshape(count, kv, -1, group * dim).transpose(0, 2, 1, 3)
        return x.reshape(-1, self.heads * dim)

    def weigh(self, scores: Tensor) -> Tensor:
        """The softmax of scores [R * K, T * G, S]."""
        if self.sinks is None:
            return self.softmax(scores)
        count, span = scores.shape[0] // self.kv_heads, scores.shape[2]
        sinks = self.sinks.reshape(1, self.kv_heads, 1, self.group)
        rows = scores[:, :, :1].reshape(count, self.kv_heads, -1, self.group) * 0.0 + sinks
        both = self.beside((scores, rows.reshape(count * self.kv_heads, -1, 1)))
        return self.softmax(both)[:, :, :span]

    def gather_slots(self, cache: Tensor, slot: Tensor | None) -> Tensor:
        """Cached keys or values of the given slots, or of all: [R * K, S, D]."""
        if slot is not None:
            cache = self.gather(cache.reshape(self.slots, -1), slot, 0)
        return cache.reshape(-1, self.length, self.head_dim)


class Router(nn.Cell):
    """Chooses each token's experts, of E."""

    def __init__(
        self,
        options: BuildOptions,
        given: FeedForward,
        router: Array,
        bias: Array | None = None,
        choice_bias: Array | None = None,
    ) -> None:
        """`router` [E, hidden], its `bias` [E], and `choice_bias` [E] of probabilities."""
        super().__init__()
        experts = given.experts
        assert experts is not None
        self.gated = Gate(given)
        self.chosen, self.renormalized = experts.chosen, experts.renormalized
        self.count, self.scale = experts.count, experts.scale
        self.router = Linear(options, router, bias)
        self.softmax, self.top = ops.Softmax(-1), ops.TopK(sorted=True)
        self.sum = ops.ReduceSum(keep_dims=True)
        self.sigmoid = experts.sigmoid
        self.choice_bias = None if choice_bias is None else parameter(choice_bias, "choice_bias")
        self.groups, self.chosen_groups = experts.groups, experts.chosen_groups
        self.best_of_group = experts.best_of_group
        self.by_scores = choice_bias is not None or self.chosen_groups < self.groups
        self.gather = ops.GatherD()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden] -> factors and indices of the chosen experts [n, chosen]."""
        logits = self.router(x)
        probabilities = ops.sigmoid(logits) if self.sigmoid else self.softmax(logits)
        if self.by_scores:
            chosen = self.top(self.scores(probabilities), self.chosen)[1]
            factors = self.gather(probabilities, 1, chosen)
        else:
            factors, chosen = self.top(probabilities, self.chosen)
        if self.renormalized:
            factors = factors / self.sum(factors, -1)
        return (factors if self.scale == 1.0 else factors * self.scale), chosen

    def scores(self, probabilities: Tensor) -> Tensor:
        """Scores to choose experts by [n, E]: far below all others outside of the best groups."""
        scores = probabilities
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if self.chosen_groups == self.groups:
            return scores
        grouped = scores.reshape(-1, self.groups, self.count // self.groups)
        best = self.sum(self.top(grouped, self.best_of_group)[0], -1).reshape(-1, self.groups)
        taken = self.top(best, self.chosen_groups)[1]
        allowed = ops.one_hot(taken, self.groups, 1.0, 0.0).sum(1)
        grouped = grouped + (allowed - 1.0).reshape(-1, self.groups, 1) * -MASKED
        return grouped.reshape(-1, self.count)


@dataclass(frozen=True)
class MixtureBiases:
    """Biases of a mixture of E experts of width W; None: there are none."""

    router: Array | None = None  # [E]
    choice: Array | None = None  # [E]
    gates: Array | None = None  # [E * W], as ups
    ups: Array | None = None
    downs: Array | None = None  # [E, hidden]


class DenseMixture(Router):
    """Router and experts of width W, of stock operators; a rank's shard has a part of each width.

    Every expert computes every token, and what a token did not choose counts nothing: the layer is
    one feed-forward network as wide as all experts together, with a mask. Graphs stay small and
    their shapes fixed; the native operators read only the chosen experts.
    """

    def __init__(
        self,
        options: BuildOptions,
        given: FeedForward,
        router: Array,
        gates: Sequence[Array],
        ups: Sequence[Array],
        downs: Sequence[Array],
        combine: Combine | None,
        biases: MixtureBiases | None = None,
    ) -> None:
        """`router` [E, hidden], `gates` and `ups` [W, hidden], `downs` [hidden, W]."""
        biases = biases or MixtureBiases()
        super().__init__(options, given, router, biases.router, biases.choice)
        self.gate = Linear(options, np.concatenate(gates), biases.gates)
        self.up = Linear(options, np.concatenate(ups), biases.ups)
        self.down = Linear(options, np.concatenate(downs, axis=1), combine=combine)
        self.width = self.up.widths[1] // self.count
        self.down_bias = None if biases.downs is None else parameter(biases.downs, "down_bias")
        self.weigh = ops.MatMul()
        self.one_hot, self.matmul = ops.OneHot(), ops.BatchMatMul()
        self.one, self.zero = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        assert given.experts is not None
        self.scaled_inputs = given.experts.scaled_inputs

    def construct(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden]."""
        factors, chosen = self.route(x)
        places = self.one_hot(chosen, self.count, self.one, self.zero)  # [n, chosen, E]
        factors = self.matmul(factors.reshape(-1, 1, self.chosen), places)
        factors, wide = factors.reshape(-1, self.count, 1), (-1, self.count, self.width)
        gate, up = self.gate(x).reshape(wide), self.up(x).reshape(wide)
        if self.scaled_inputs:  # without biases
            inner = self.gated(gate * factors, up * factors)
        else:
            inner = self.gated(gate, up) * factors
        y = self.down(inner.reshape(-1, self.down.widths[0]))
        if self.down_bias is not None:
            y = y + self.weigh(factors.reshape(-1, self.count), self.down_bias)
        return y
