"""MindSpore's fused operators by what their documents say, out of stock ones that run on CPU.

They stand in for the operators in tests of the networks that are built for Ascend. All compute in
float32 and round what they give to the type of their input.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from lite_runner.networks import ascend_layers


class RmsNorm(nn.Cell):
    """ops.rms_norm: y = x / sqrt(mean(x^2) + epsilon) * gamma, and 1 / sqrt(...)."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def construct(self, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.astype(ms.float32)
        spread = 1.0 / ops.sqrt((wide * wide).mean(-1, keep_dims=True) + self.epsilon)
        return (wide * spread * gamma).astype(x.dtype), spread


class ReshapeAndCache(nn.Cell):
    """Writes keys and values [batch, sequence, K * D] to caches [blocks, block_size, K, D]; token
    i at place slot_mapping[i], counted over the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.update = ops.ScatterNdUpdate()

    def construct(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        size = key_cache.shape[1]
        place = ops.stack((slot_mapping // size, slot_mapping % size), -1)
        heads, dim = key_cache.shape[2:]
        written = self.update(key_cache, place, key.reshape(-1, heads, dim))
        key = ops.depend(key, written)
        written = self.update(value_cache, place, value.reshape(-1, heads, dim))
        return ops.depend(key, written)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """q [B, H, T, D], k and v [B, K, S, D], bias [B, H, T, S] -> [B, T, H * D]."""
    q, k, v = (one.astype(ms.float32) for one in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = ops.repeat_elements(k, group, 1), ops.repeat_elements(v, group, 1)
    weights = ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) * scale + bias, -1)
    x = ops.matmul(weights, v).transpose(0, 2, 1, 3)
    return x.reshape(x.shape[0], -1, x.shape[2] * x.shape[3])


class PagedAttentionMask(nn.Cell):
    """A query [tokens, 1, H * D] over the blocks that block_tables [tokens, blocks] names, the
    first context_lens of their positions; alibi_mask [tokens, H, 1, positions] is added behind the
    scale."""

    def __init__(self, head_num: int, scale_value: float, kv_head_num: int) -> None:
        super().__init__()
        self.heads, self.scale, self.kv_heads = head_num, scale_value, kv_head_num

    def construct(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        antiquant_scale: Tensor | None = None,
        antiquant_offset: Tensor | None = None,
        alibi_mask: Tensor | None = None,
    ) -> Tensor:
        rows, dim = query.shape[0], key_cache.shape[-1]
        shape = (rows, -1, self.kv_heads, dim)
        k = ops.gather(key_cache, block_tables, 0).reshape(shape).transpose(0, 2, 1, 3)
        v = ops.gather(value_cache, block_tables, 0).reshape(shape).transpose(0, 2, 1, 3)
        q = query.reshape(rows, self.heads, 1, dim)
        seen = ops.arange(k.shape[2]) < context_lens.reshape(-1, 1, 1, 1)
        bias = ops.select(seen, Tensor(0.0, ms.float32), Tensor(-np.inf, ms.float32))
        if alibi_mask is not None:
            bias = bias + alibi_mask.astype(ms.float32)
        return attend(q, k, v, bias, self.scale).astype(query.dtype)


class FlashAttentionScore(nn.Cell):
    """softmax(mask(scale * (real_shift + q k^T))) v, layout BSH: q [B, S1, H * D], k and v
    [B, S2, K * D], real_shift [B, H, S1, S2]; attn_mask [B, 1, S1, S2] is true where a score is
    left out; the last of four is the result."""

    def __init__(self, head_num: int, scale_value: float, input_layout: str) -> None:
        super().__init__()
        assert input_layout == "BSH"
        self.heads, self.scale = head_num, scale_value

    def construct(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real_shift: Tensor | None = None,
        drop_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        rows, dim = query.shape[0], query.shape[2] // self.heads
        q, k, v = (
            one.reshape(rows, -1, one.shape[2] // dim, dim).transpose(0, 2, 1, 3)
            for one in (query, key, value)
        )
        bias = ops.select(attn_mask, Tensor(-np.inf, ms.float32), Tensor(0.0, ms.float32))
        if real_shift is not None:
            bias = bias + self.scale * real_shift.astype(ms.float32)
        out = attend(q, k, v, bias, self.scale).astype(query.dtype)
        return out, out, out, out


class WeightQuantBatchMatmul(nn.Cell):
    """x @ ((weight + antiquant_offset) * antiquant_scale): weight [k, n], or [n, k] transposed;
    scale and offset [n], or [k / group, n]. Four bits come as pairs in a byte, the even one low."""

    def __init__(self, transpose_x: bool, transpose_weight: bool, group: int) -> None:
        super().__init__()
        assert not transpose_x
        self.transposed, self.group = transpose_weight, group

    def construct(
        self,
        x: Tensor,
        weight: Tensor,
        antiquant_scale: Tensor,
        antiquant_offset: Tensor | None,
        quant_scale: Tensor | None,
        quant_offset: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        if weight.dtype == ms.uint8:  # see `nibbles`
            wide = weight.astype(ms.int32)
            pair = ops.stack((wide % 16, wide // 16), -1).reshape(wide.shape[0], -1)
            values = ops.select(pair > 7, pair - 16, pair).astype(ms.float32)
        else:
            values = weight.astype(ms.float32)
        if self.transposed:
            values = values.transpose(1, 0)
        inputs, outputs = values.shape
        values = values.reshape(-1, self.group or inputs, outputs)
        if antiquant_offset is not None:
            values = values + antiquant_offset.astype(ms.float32).reshape(-1, 1, outputs)
        values = values * antiquant_scale.astype(ms.float32).reshape(-1, 1, outputs)
        y = ops.matmul(x.astype(ms.float32), values.reshape(inputs, outputs))
        return y.astype(x.dtype)


def nibbles(values: np.ndarray, name: str) -> ms.Parameter:
    """The bytes of quantized.nibbles; no operator on CPU reads a pair of four bits as such."""
    return ms.Parameter(Tensor(values.view(np.uint8)), name, False)


class DynamicQuantExt(nn.Cell):
    """scale = max(|x|) / 127 of each row, y = round(x / scale) as int8."""

    def construct(self, x: Tensor, smooth_scales: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = x.astype(ms.float32)
        scale = ops.abs(wide).max(-1, keepdims=True) / 127.0
        return ops.round(wide / scale).astype(ms.int8), scale.reshape(-1)


class QuantBatchMatmul(nn.Cell):
    """(x1 @ x2^T) * scale [n] * pertoken_scale [rows] as `dtype`; x1 and x2 are int8."""

    def __init__(self, transpose_x1: bool, transpose_x2: bool, dtype: ms.Type) -> None:
        super().__init__()
        assert transpose_x2 and not transpose_x1
        self.dtype = dtype

    def construct(
        self,
        x1: Tensor,
        x2: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        bias: Tensor | None,
        pertoken_scale: Tensor,
    ) -> Tensor:
        # Exact: a sum of products of int8 fits into float32's 24 bits for a thousand of them.
        y = ops.matmul(x1.astype(ms.float32), x2.astype(ms.float32).transpose(1, 0))
        return (y * scale * pertoken_scale.reshape(-1, 1)).astype(self.dtype)


class MoeInitRoutingV2(nn.Cell):
    """Rows of x [n, H] once for each expert of expert_idx [n, K], sorted by expert; where each
    went [n * K]; how many rows each expert has [expert_num]."""

    def __init__(self) -> None:
        super().__init__()
        self.sort = ops.Sort()

    def construct(
        self,
        x: Tensor,
        expert_idx: Tensor,
        active_num: int,
        expert_capacity: int,
        expert_num: int,
        drop_pad_mode: int,
        expert_tokens_count_or_cumsum_flag: int,
        expert_tokens_before_capacity_flag: bool,
    ) -> tuple[Tensor, ...]:
        # No row is dropped, and 2 asks for counts.
        assert (active_num, expert_capacity, drop_pad_mode) == (0, 0, 0)
        assert expert_tokens_count_or_cumsum_flag == 2
        chosen = expert_idx.shape[1]
        wide = expert_idx.reshape(-1).astype(ms.float32)
        index = ops.cumsum(ops.ones_like(wide), 0) - 1
        order = self.sort(wide * 4096 + index)[1]  # stable
        places = self.sort(order.astype(ms.float32))[1]
        counts = ops.one_hot(expert_idx.reshape(-1), expert_num, 1, 0).sum(0)
        return ops.gather(x, order // chosen, 0), places, counts, counts


class GroupedMatmulV4(nn.Cell):
    """x [m, K] by weight [E, K, N]: the first group_list[0] rows by the first expert, and so on."""

    def construct(
        self,
        x: list[Tensor],
        weight: list[Tensor],
        bias: None = None,
        scale: None = None,
        offset: None = None,
        antiquant_scale: None = None,
        antiquant_offset: None = None,
        pre_token_scale: None = None,
        group_list: Tensor | None = None,
        split_item: int = 0,
        group_type: int = -1,
        group_list_type: int = 0,
    ) -> tuple[Tensor]:
        assert (split_item, group_type, group_list_type) == (3, 0, 1)
        rows, weights = x[0].astype(ms.float32), weight[0].astype(ms.float32)
        index = ops.cumsum(ops.ones_like(rows[:, :1]), 0) - 1
        ends = ops.cumsum(group_list.astype(ms.float32), 0)
        owner = (index >= ends.reshape(1, -1)).astype(ms.int32).sum(1)
        y = ops.zeros_like(ops.matmul(rows, weights[0]))
        for expert in range(weights.shape[0]):
            mine = (owner == expert).astype(ms.float32).reshape(-1, 1)
            y = y + mine * ops.matmul(rows, weights[expert])
        return (y.astype(x[0].dtype),)


class MoeTokenUnpermute(nn.Cell):
    """The sum of permuted_tokens [n * K, H] at sorted_indices [n * K], times probs [n, K]."""

    def construct(
        self,
        permuted_tokens: Tensor,
        sorted_indices: Tensor,
        probs: Tensor,
        padded_mode: bool,
        restore_shape: None,
    ) -> Tensor:
        assert not padded_mode and restore_shape is None
        found = ops.gather(permuted_tokens.astype(ms.float32), sorted_indices, 0)
        found = found.reshape(-1, probs.shape[1], found.shape[1])
        y = (found * probs.astype(ms.float32).expand_dims(-1)).sum(1)
        return y.astype(permuted_tokens.dtype)


# The names by which the networks call them -> what stands in.
STAND_INS = {
    "RmsNorm": RmsNorm,
    "ReshapeAndCache": ReshapeAndCache,
    "PagedAttention": PagedAttentionMask,
    "PagedAttentionMask": PagedAttentionMask,
    "FlashAttentionScore": FlashAttentionScore,
    "MoeInitRoutingV2": MoeInitRoutingV2,
    "GroupedMatmulV4": GroupedMatmulV4,
    "MoeTokenUnpermute": MoeTokenUnpermute,
    "WeightQuantBatchMatmul": WeightQuantBatchMatmul,
    "nibbles": nibbles,
    "DynamicQuantExt": DynamicQuantExt,
    "QuantBatchMatmul": QuantBatchMatmul,
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks for Ascend are built of the stand-ins."""
    for name, cell in STAND_INS.items():
        monkeypatch.setattr(ascend_layers, name, cell)
