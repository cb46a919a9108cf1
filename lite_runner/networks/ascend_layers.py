"""Layers of MindSpore's fused operators for Ascend: norms, attention, experts, quantized ones.

The KV cache is paged in blocks of BLOCK positions, [slots * blocks, BLOCK, K, D]; a slot owns
consecutive blocks. Queries are scaled before the operators: the documentation of
FlashAttentionScore disagrees on whether scale or bias comes first. Of its two kernels CANN's is
required, which takes a boolean mask and a bias for any query and key lengths: see
`device.choose_attention`.

A prompt chunk attends to all positions of its slot, so that all chunks use the same graph.

Quantized layers compute (q + offset) * scale, with scale and offset in the type of x, per column of
the weight or per group. They support at most 65535 outputs, which vocabularies exceed: embedding
and head use dequantized weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.auto_generate import (
    DynamicQuantExt,
    FlashAttentionScore,
    GroupedMatmulV4,
    MoeInitRoutingV2,
    MoeTokenUnpermute,
    PagedAttention,
    PagedAttentionMask,
    QuantBatchMatmul,
    ReshapeAndCache,
    RmsNorm,
    WeightQuantBatchMatmul,
)
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder, FeedForward
from lite_runner.networks.layers import (
    Array,
    BuildOptions,
    CacheSize,
    MixtureBiases,
    Router,
    StepPositions,
    make_cache,
    parameter,
)
from lite_runner.networks.tensor_parallel import Combine
from lite_runner.weights import widened
from lite_runner.weights.quantization.quantized import QuantizedTensor, packed, quantize, unpacked
from lite_runner.weights.read_ahead import QuantizedWeights

BLOCK = 64  # a multiple of 16; with the largest head, 256, the most that PagedAttention takes
HEAD_DIM_STEP = 16  # FlashAttentionScore requires a multiple of this
TYPES = (ms.float16, ms.bfloat16)  # supported by the attention operators
LOWEST = -3.0e4  # minimum ALiBi bias; bias plus score still fits float16

# (cached tokens per row [R], None in a prefill; mask, true where keys are hidden [R, 1, T, S], None
# in a decode; ALiBi bias [R, H, T, S], or None)
Seen: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


def supports(dtype: ms.Type, config: Decoder) -> bool:
    """True if the fused operators support a network in this type."""
    # PagedAttentionMask requires the ALiBi bias as float16, and the query in the same type.
    types = (ms.float16,) if config.attention.alibi else TYPES
    # PagedAttention attends to the whole row, by plain scores: no sliding window shorter than the
    # context, no soft cap.
    whole = all(window is None or window >= config.seq_length for window in config.windows)
    plain = config.prefix is None and not any(
        one.attention.softcap is not None or one.attention.sinks or one.attention.latent
        for one in config.blocks
    )
    return dtype in types and config.head_dim % HEAD_DIM_STEP == 0 and whole and plain


def blocks_of(cache: CacheSize) -> int:
    """Blocks per slot."""
    return -(-cache.length // BLOCK)


class FusedRMSNorm(nn.Cell):
    """As RMSNorm."""

    def __init__(self, gamma: Array, eps: float) -> None:
        super().__init__()
        self.gamma = parameter(gamma, "gamma")
        self.norm = RmsNorm(eps)

    def construct(self, x: Tensor) -> Tensor:
        return self.norm(x, self.gamma)[0]


class PagedInputs(StepPositions):
    """As StepInputs, for FusedAttention."""

    def __init__(
        self,
        options: BuildOptions,
        heads: int,
        kv_heads: int,
        slopes: Array | None,
        window: int | None,
    ) -> None:
        """`slopes` [H]: ALiBi's; `kv_heads` and `window` are used by the stock layers only: see
        `supports`."""
        super().__init__()
        del kv_heads, window
        self.dtype = options.dtype
        if options.cache is not None:
            self.resize(options.cache)
        self.slopes = None
        if slopes is not None:
            self.slopes = Tensor(slopes.astype(np.float32).reshape(1, heads, 1, 1))
        self.lowest = Tensor(LOWEST, ms.float32)

    def resize(self, cache: CacheSize) -> None:
        self.capacity = blocks_of(cache) * BLOCK
        self.set_cache(cache, self.capacity)

    def construct(
        self,
        tokens: Tensor,
        position: Tensor,
        length: Tensor,
        slot: Tensor | None,
        prefix: None = None,
    ) -> tuple[Tensor, Tensor, Seen]:
        """tokens [R, T], position and length [R] -> position ids [n], cache slot mapping [n], and
        masks and biases of the scores."""
        positions, owner, keys = self.positions_of(tokens, position, length, slot)
        rows = positions
        if self.cache is not None:
            rows = owner.reshape(-1, 1) * self.capacity + positions
        count, step = positions.shape
        distance = keys - positions.reshape(count, 1, step, 1)  # at most 0 for visible keys
        bias = None
        if self.slopes is not None:
            bias = ops.maximum(self.slopes * ops.minimum(distance, 0), self.lowest)
            bias = bias.astype(self.dtype)
        # PagedAttention needs only the length of each row.
        seen = (length, None, bias) if slot is None else (None, distance > 0, bias)
        return positions.reshape(-1), rows.reshape(-1), seen


class FusedAttention(nn.Cell):
    """As Attention, over a paged cache."""

    def __init__(
        self,
        options: BuildOptions,
        heads: int,
        kv_heads: int,
        head_dim: int,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> None:
        """`softcap` and `sinks` are of the stock layers only: see `supports`."""
        super().__init__()
        del softcap, sinks
        self.width, self.kv_width = heads * head_dim, kv_heads * head_dim
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.dtype = options.dtype
        self.cached = options.cache is not None
        if options.cache is not None:
            self.resize(options.cache)
        self.write, self.gather = ReshapeAndCache(), ops.Gather()
        self.paged = PagedAttention(heads, 1.0, kv_heads)
        self.paged_biased = PagedAttentionMask(heads, 1.0, kv_heads)
        self.flash = FlashAttentionScore(heads, scale_value=1.0, input_layout="BSH")

    def resize(self, cache: CacheSize) -> None:
        self.slots, blocks = cache.slots, blocks_of(cache)
        self.capacity = blocks * BLOCK
        make_cache(self, (cache.slots * blocks, BLOCK, self.kv_heads, self.head_dim))
        owned = np.arange(cache.slots * blocks, dtype=np.int32)
        self.tables = Tensor(owned.reshape(cache.slots, blocks))

    def construct(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, seen: Seen, slot: Tensor | None
    ) -> Tensor:
        """q [n, H * D], k and v [n, K * D], the rest from PagedInputs -> [n, H * D]."""
        length, hidden, bias = seen
        q, k, v = (q * self.scale).astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype)
        if self.cached:
            k, v = k.reshape(-1, 1, self.kv_width), v.reshape(-1, 1, self.kv_width)
            written = self.write(k, v, self.keys, self.values, rows)
            # An explicit dependency: the cache is read after it was written.
            q = ops.depend(q, written)
            if slot is None:
                q = q.reshape(-1, 1, self.width)
                x = self.decode(q, length, bias)
                return x.reshape(-1, self.width).astype(ms.float32)
            k = self.gather_slots(ops.depend(self.keys, written), slot)
            v = self.gather_slots(ops.depend(self.values, written), slot)
        assert hidden is not None  # in a prefill
        count = hidden.shape[0]
        q = q.reshape(count, -1, self.width)
        k, v = k.reshape(count, -1, self.kv_width), v.reshape(count, -1, self.kv_width)
        x = self.flash(q, k, v, bias, None, None, hidden)[3]
        return x.reshape(-1, self.width).astype(ms.float32)

    def decode(self, q: Tensor, length: Tensor, bias: Tensor | None) -> Tensor:
        """Decode attention of one token per slot [slots, 1, H * D], in place on the paged cache."""
        if bias is None:
            return self.paged(q, self.keys, self.values, self.tables, length)
        return self.paged_biased(q, self.keys, self.values, self.tables, length, None, None, bias)

    def gather_slots(self, cache: Tensor, slot: Tensor) -> Tensor:
        """Cached keys or values of the given slots [R, S, K * D]."""
        found = self.gather(cache.reshape(self.slots, -1), slot, 0)
        return found.reshape(-1, self.capacity, self.kv_width)


class GroupedMixture(Router):
    """As DenseMixture, for Ascend: each token is computed by the experts it chose, as
    vllm-mindspore computes them. Tokens are sorted by expert, and GroupedMatmulV4 multiplies each
    expert's."""

    def __init__(
        self,
        options: BuildOptions,
        given: FeedForward,
        router: Array,
        gates: Sequence[Array],
        ups: Sequence[Array],
        downs: Sequence[Array],
        combine: Combine | None,
        biases: MixtureBiases,
    ) -> None:
        """See DenseMixture; `biases` of the router alone."""
        super().__init__(options, given, router, biases.router, biases.choice)

        def every(weights: Sequence[Array], name: str) -> ms.Parameter:
            return parameter(np.stack([one.T for one in weights]), name, options.dtype)

        self.gate, self.up = every(gates, "gate"), every(ups, "up")  # [E, hidden, W]
        self.down = every(downs, "down")  # [E, W, hidden]
        self.dtype, self.combine = options.dtype, combine
        self.sort, self.matmul = MoeInitRoutingV2(), GroupedMatmulV4()
        self.unsort = MoeTokenUnpermute()

    def construct(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden]."""
        factors, chosen = self.route(x)
        # 0, 0: no capacity, so no token is dropped; 2: how many tokens each expert has.
        rows, places, counts, _ = self.sort(
            x.astype(self.dtype), chosen.astype(ms.int32), 0, 0, self.count, 0, 2, True
        )
        counts = counts.astype(ms.int64)
        inner = self.gated(
            self.grouped(rows, self.gate, counts).astype(ms.float32),
            self.grouped(rows, self.up, counts).astype(ms.float32),
        )
        y = self.grouped(inner.astype(self.dtype), self.down, counts)
        y = self.unsort(y, places, factors.astype(self.dtype), False, None).astype(ms.float32)
        return y if self.combine is None else self.combine(y)

    def grouped(self, x: Tensor, weights: ms.Parameter, counts: Tensor) -> Tensor:
        """x [m, in], sorted by expert, by weights [E, in, out]; counts [E] -> [m, out]."""
        # 3, 0, 1: one tensor each, groups of rows, given by their sizes.
        return self.matmul(
            *([x], [weights], None, None, None, None, None, None, counts),
            split_item=3,
            group_type=0,
            group_list_type=1,
        )[0]


class LinearIntegers:
    """A network's weights by name, each taken once: quantized for linear layers if available."""

    def __init__(self, weights: QuantizedWeights, config: Decoder) -> None:
        table = parameters(config)
        self._weights = weights
        self._ends = {table[0].name, "lm_head.weight"}
        self._linear = {one.name: one.layout for one in table if one.is_linear}

    def __call__(self, name: str) -> Any:
        """A QuantizedTensor [out, in], or float32 as `layouts` has it."""
        if name not in self._linear and name not in self._ends:
            return self._weights.vector(name)
        values = self._weights.matrix(name)
        if isinstance(values, QuantizedTensor):
            return values if name in self._linear else values.float32()
        floats = widened(values) if isinstance(values, np.ndarray) else values.float32()
        return floats.T if self._linear.get(name) == "in_out" else floats


def integers(values: NDArray[np.int8], name: str) -> Parameter:
    return Parameter(Tensor.from_numpy(np.ascontiguousarray(values)), name, False)


def nibbles(values: NDArray[np.int8], name: str) -> Parameter:
    """Packed 4-bit pairs as MindSpore's qint4x2; the shape is that of the bytes."""
    return Parameter(Tensor(values, dtype=ms.qint4x2), name, False)


def signed_nibbles(weight: QuantizedTensor) -> tuple[NDArray[np.int8], Array, Array]:
    """4-bit weights as (q + offset) * scale: q from -8 to 7 [in, out / 2], two outputs per byte,
    the even one in the low nibble; scales and offsets [groups, out].

    A group of equal values has no scale: its value becomes the scale, with q = -8.
    """
    assert weight.minimums is not None  # 4-bit weights have them
    scales = weight.scales.astype(np.float32)
    minimums = weight.minimums.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        offsets = minimums / scales + 8
    # Such an offset would overflow float16: the group is constant to its precision.
    level = ~(np.abs(offsets) < 60000)
    scales = np.where(level, minimums / -8, scales)
    offsets = np.where(level, 0, offsets)
    q = unpacked(weight.values)  # type: ignore[arg-type]
    grouped = q.reshape(len(q), -1, weight.group)
    grouped[level] = 0
    # Two's complement: adding 8 to 0..15 within four bits turns q into q - 8.
    pairs = packed(np.ascontiguousarray((q ^ 8).T))
    return pairs.view(np.int8), scales.T, offsets.T


class WeightQuantProduct(nn.Cell):
    """x [n, in] by a quantized weight [out, in] -> [n, out], in the type of `options`."""

    def __init__(self, options: BuildOptions, weight: QuantizedTensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        grouped = weight.group not in (0, columns)  # one group means none to the operator
        offsets = None
        if weight.bits == 4:
            pairs, scales, offsets = signed_nibbles(weight)
            self.weight = nibbles(pairs, "weight")
        else:
            values: NDArray[Any] = weight.values
            self.weight = integers(values.T if grouped else values, "weight")
            scales = weight.scales.reshape(rows, -1).T
        if not grouped:
            scales = scales[0]
            offsets = None if offsets is None else offsets[0]
        self.scales = parameter(scales, "scales", options.dtype)
        self.offsets = None if offsets is None else parameter(offsets, "offsets", options.dtype)
        # Layout of the weight: [out, in] is faster per column, [in, out] per group.
        out_major = weight.bits == 8 and not grouped
        group = weight.group if grouped else 0
        self.matmul = WeightQuantBatchMatmul(False, out_major, group)

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.scales, self.offsets, None, None, None)


class IntegerProduct(nn.Cell):
    """As WeightQuantProduct with int8 inputs: each row of x is quantized with its own scale."""

    def __init__(self, options: BuildOptions, weight: QuantizedTensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        if weight.group not in (0, columns):
            # The operator has no groups: group-quantized weights are requantized per row.
            weight = quantize(weight.float32(), 8, 0)
        values: NDArray[Any] = weight.values
        self.weight = integers(values, "weight")
        self.scales = parameter(weight.scales.reshape(rows), "scales")
        self.round = DynamicQuantExt()
        self.matmul = QuantBatchMatmul(False, True, options.dtype)

    def construct(self, x: Tensor) -> Tensor:
        q, scales = self.round(x, None)
        return self.matmul(q, self.weight, self.scales, None, None, scales)


class QuantizedLinear(nn.Cell):
    """As Linear, with a quantized weight."""

    def __init__(
        self,
        options: BuildOptions,
        weight: QuantizedTensor,
        bias: Array | None = None,
        combine: Combine | None = None,
    ) -> None:
        super().__init__()
        self.widths = weight.shape[::-1]
        kind = IntegerProduct if options.integer_input and weight.bits == 8 else WeightQuantProduct
        self.product = kind(options, weight)
        self.bias = None if bias is None else parameter(bias, "bias")
        self.dtype = options.dtype
        self.add = ops.BiasAdd()
        self.combine = combine

    def construct(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """`added` [n, out]: this rank's LoRA delta."""
        y = self.product(x.astype(self.dtype)).astype(ms.float32)
        if added is not None:
            y = y + added
        if self.combine is not None:
            y = self.combine(y)
        return y if self.bias is None else self.add(y, self.bias)
