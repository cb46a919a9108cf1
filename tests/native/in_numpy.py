"""Weights, norms and steps for the tests of the operators, and what they mean in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.native import matrices
from lite_runner.native.structs import (
    Activation,
    AttentionLayer,
    FeedForwardLayer,
    NormValues,
    Residual,
)
from lite_runner.weights import narrowed, widened
from lite_runner.weights.quantization.quantized import QuantizedTensor, quantize

# Numbers are around one, and go through a few hundred roundings of 6e-8 each.
CLOSE = 2e-5
# What multiplies integers is rounded to 16 bits, of the largest in a group: that adds up over the
# inputs of a product as a random walk does.
CLOSE_INTEGERS = 2e-4
OUTLIER = np.float32(1.75)  # kOutlier
BASE = np.full(1, -1, np.int32)  # places of adapters: none is looked at
NO_ROPE = np.zeros((1, 1), np.float32)

Wide = NDArray[np.float64]
Floats = NDArray[np.float32]


def close(kind: str) -> float:
    return CLOSE_INTEGERS if kind in ("int8", "int4") else CLOSE


def attention_fields(
    heads: int, kv_heads: int, head_dim: int, hidden: int, *, rotary: bool, window: int = 0
) -> AttentionLayer:
    return AttentionLayer(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        rope_width=head_dim,
        window=window,
        scale=head_dim**-0.5,
        residual=Residual(scale=1.0),
    )


def feed_forward_fields(hidden: int, wide: int, gated: bool) -> FeedForwardLayer:
    """SwiGLU, or an MLP with GELU."""
    activation = Activation.SILU if gated else Activation.GELU
    return FeedForwardLayer(
        hidden=hidden, wide=wide, gated=gated, activation=activation, residual=Residual(scale=1.0)
    )


def a_norm(size: int, centred: bool, rng: np.random.Generator) -> NormValues:
    gamma = rng.standard_normal(size, np.float32)
    return NormValues(gamma, rng.standard_normal(size, np.float32) if centred else None, 1e-5)


def normed(x: Floats, norm: NormValues) -> Wide:
    wide = x.astype(np.float64)
    if norm.beta is not None:
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + norm.epsilon) * norm.gamma
    return wide if norm.beta is None else wide + norm.beta


def a_matrix(out: int, inputs: int, kind: str, rng: np.random.Generator) -> matrices.Weight:
    weight = rng.standard_normal((out, inputs), np.float32) / np.float32(np.sqrt(inputs))
    if kind == "int8":
        return quantize(weight, 8, 0)
    if kind in ("float16", "bfloat16"):
        return narrowed(weight, "F16" if kind == "float16" else "BF16")
    return quantize(weight, 4, 32) if kind == "int4" and inputs % 32 == 0 else weight


def values(weight: matrices.Weight) -> Wide:
    plain = weight.float32() if isinstance(weight, QuantizedTensor) else widened(weight)
    return plain.astype(np.float64)


def rounded(
    x: Floats, group: int, most: int, *, eight: bool = False
) -> tuple[NDArray[np.int64], Floats]:
    """Integers up to `most` [rows, groups, group] and scales [rows, groups] of the inputs of matrix
    products, as documented. `eight`: up to 127, but in groups with an outlier."""
    grouped = np.pad(x, ((0, 0), (0, -x.shape[1] % group))).reshape(len(x), -1, group)
    bound = abs(grouped).max(2)
    # One after the other: a sum by pairs may differ in its last bit.
    total = np.add.accumulate(bound, 1, dtype=np.float32)[:, -1:]
    outlier = bound > total * (OUTLIER / np.float32(bound.shape[1]))
    largest = np.where(outlier, most, 127 if eight else most).astype(np.float32)
    factor = np.divide(largest, bound, out=np.zeros_like(bound), where=bound > 0)
    return np.rint(grouped * factor[..., None]).astype(np.int64), bound / largest


def with_outliers(x: Floats, rng: np.random.Generator) -> Floats:
    """x [rows, inputs] with a large column, and a larger number in one row."""
    x[:, rng.integers(x.shape[1])] *= 20
    x[rng.integers(len(x)), rng.integers(x.shape[1])] *= 100
    return x


def step_words(
    capacity: int,
    slots: NDArray[Any],
    positions: NDArray[Any],
    tokens: NDArray[Any] | None = None,
    wanted: tuple[int, ...] = (),
) -> NDArray[np.int32]:
    """A step as layers.h describes it; what is not live is what no operator may look at."""
    words = np.full(2 + 4 * capacity + len(wanted) + 3, 0x7FFFFFF0, np.int32)
    count = len(slots)
    words[:2] = count, len(wanted)
    rows = words[2 : 2 + 4 * capacity].reshape(4, capacity)[:, :count]
    rows[0] = 0 if tokens is None else tokens
    rows[1], rows[2], rows[3] = slots, positions, positions
    words[2 + 4 * capacity :][: len(wanted)] = wanted
    return words
