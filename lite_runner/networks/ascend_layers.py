"""The layers of `layers` implemented with MindSpore's fused operators, for Ascend.

The KV cache is paged in blocks of BLOCK positions, [slots * blocks, BLOCK, K, D]; a slot owns
consecutive blocks. Queries are scaled before the operators: the documentation of
FlashAttentionScore disagrees on whether scale or bias comes first. Of its two kernels CANN's is
required, which takes a boolean mask and a bias for any query and key lengths: see
`device.choose_attention`.

A prompt chunk attends to all positions of its slot, so that all chunks use the same graph.
"""

from __future__ import annotations

from typing import TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import (
    FlashAttentionScore,
    PagedAttention,
    PagedAttentionMask,
    ReshapeAndCache,
    RmsNorm,
)

from lite_runner.architectures.spec import Decoder
from lite_runner.networks.layers import (
    Array,
    BuildOptions,
    CacheSize,
    StepPositions,
    make_cache,
    parameter,
)

BLOCK = 64  # a multiple of 16; with the largest head, 256, the most that PagedAttention takes
HEAD_DIM_STEP = 16  # FlashAttentionScore requires a multiple of this
TYPES = (ms.float16, ms.bfloat16)  # supported by the attention operators
LOWEST = -3.0e4  # minimum ALiBi bias; bias plus score still fits float16

# (cached tokens per row [R], None in a prefill; mask, true where keys are hidden [R, 1, T, S], None
# in a decode; ALiBi bias [R, H, T, S], or None)
Seen: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


def supports(dtype: ms.Type, config: Decoder) -> bool:
    """Whether the fused operators support a network in this type."""
    # PagedAttentionMask requires the ALiBi bias as float16, and the query in the same type.
    types = (ms.float16,) if config.attention.alibi else TYPES
    # PagedAttention attends to the whole row, by plain scores: no sliding window shorter than the
    # context, no soft cap.
    whole = all(window is None or window >= config.seq_length for window in config.windows)
    plain = config.prefix is None and all(one.attention.softcap is None for one in config.blocks)
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
    ) -> None:
        """`softcap` is of the stock layers only: see `supports`."""
        super().__init__()
        del softcap
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
