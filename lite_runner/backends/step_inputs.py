"""Inputs of a step of the `resizable` graph that depend on positions, in NumPy.

Shapes as in lite_runner.mindir.resizable_inputs: B rows, S new tokens a row, n = B * S, P cached
positions, H heads, K key/value heads, G = H / K, D head_dim.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import positions
from lite_runner.architectures.spec import Decoder
from lite_runner.mindir.resizable_inputs import Shape

MASKED = np.float32(-1.0e9)  # far below any score, yet finite

Array = NDArray[np.float32]
Ints = NDArray[np.int64]


class Positions:
    """A model's rotary tables and ALiBi slopes."""

    def __init__(self, model: Decoder, length: int) -> None:
        """`length`: number of position ids."""
        self.slopes: Array | None = None  # [K, G]; None: no ALiBi
        self._cos = self._sin = np.empty((0, 0), np.float32)
        if model.attention.alibi:
            self.slopes = positions.alibi_slopes(model.num_heads).reshape(model.n_kv_heads, -1)
        rotary = model.rotary
        if rotary is None:
            return
        self._frequencies, self._factor = positions.frequencies(rotary, model.head_dim)
        self._exponents = positions.dynamic_exponents(model.head_dim)
        self._dynamic = rotary.dynamic
        if self._dynamic is None:
            ids = np.arange(length, dtype=np.float32)
            self._cos, self._sin = _cos_sin(np.outer(ids, self._frequencies), self._factor)

    def rotary(self, position_ids: Ints, length: Ints) -> tuple[Array, Array]:
        """position_ids [B, S], length [B] -> cos and sin [n, D]; sin's first half is negated."""
        if self._dynamic is None:
            flat = position_ids.reshape(-1)
            return self._cos[flat], self._sin[flat]
        # Dynamic NTK: the base grows with the row's length beyond the original one.
        factor, original = self._dynamic.factor, self._dynamic.original_seq_length
        ratio = np.maximum(length, original).astype(np.float32) * np.float32(factor / original)
        stretch = np.power((ratio - np.float32(factor - 1.0))[:, None], self._exponents)
        angles = (
            position_ids.astype(np.float32)[:, :, None] * (self._frequencies * stretch)[:, None]
        )
        return _cos_sin(angles.reshape(-1, angles.shape[-1]), 1.0)


def gather_rows(model: Decoder, shape: Shape) -> dict[str, NDArray[np.int64]]:
    """Gather indices of each row's tokens and heads; they depend on the shape only.

    Per token the fused projection holds H query, K key and K value heads, in that order.
    """
    heads, kv = model.num_heads, model.n_kv_heads
    group, count = heads // kv, shape.rows * shape.tokens
    token = np.arange(count).reshape(shape.rows, 1, shape.tokens)
    first = token * (heads + 2 * kv)
    by_kv = np.arange(kv).reshape(1, kv, 1)
    k_rows = first + heads + by_kv
    queries = first[..., None] + (by_kv[..., None] * group + np.arange(group))
    mixed = np.arange(count * heads).reshape(shape.rows, kv, shape.tokens, group)
    return {
        "q_rows": queries.reshape(shape.rows, kv, -1),
        "k_rows": k_rows,
        "v_rows": k_rows + kv,
        "merge_rows": mixed.transpose(0, 2, 1, 3).reshape(-1),
        "last_rows": token[:, 0, -1],
    }


def score_bias(
    bias: Array, start: Ints, tokens: int, slopes: Array | None, window: int | None
) -> None:
    """Fill bias [B, 1 or K, S * G, S + P] for rows whose first new token is at position start [B].

    0 or ALiBi's for visible keys, MASKED elsewhere. The first S keys are the new ones. `window`:
    sliding window in tokens, the current one included; None: full.
    """
    rows, heads, queries, keys = bias.shape
    new, cached = np.arange(tokens), np.arange(keys - tokens)
    values = np.empty((rows, tokens, keys), np.float32)
    values[:, :, :tokens] = np.where(new <= new[:, None], np.float32(0), MASKED)
    values[:, :, tokens:] = np.where(cached < start[:, None], np.float32(0), MASKED)[:, None]
    distance = np.empty((rows, tokens, keys), np.float32)  # key position - query position
    if slopes is not None or window is not None:
        distance[:, :, :tokens] = new - new[:, None]
        distance[:, :, tokens:] = cached - (start[:, None] + new)[:, :, None]
    if window is not None:
        values[distance <= -window] = MASKED
    spread = bias.reshape(rows, heads, tokens, queries // tokens, keys)
    spread[:] = values[:, None, :, None]
    if slopes is not None:
        spread += slopes[None, :, None, :, None] * distance[:, None, :, None]


def _cos_sin(angles: Array, factor: float) -> tuple[Array, Array]:
    """cos and sin [n, D] of angles [n, D / 2], duplicated; sin's first half is negated."""
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    return (
        np.concatenate([cos, cos], 1).astype(np.float32),
        np.concatenate([-sin, sin], 1).astype(np.float32),
    )
