"""The search for the scales of GGUF's blocks: NumPy's to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.training.kernels import searched
from tests.native.in_numpy import Floats

TINY = np.float32(1e-30)
STEPS = np.arange(-0.9, 0.95, 0.1, dtype=np.float32)


def with_minimum(x: Floats, weights: Floats, firsts: Floats) -> tuple[Floats, Floats]:
    """Of integers 0 to 15."""
    low = np.minimum(x.min(-1), 0)
    span = x.max(-1) - low
    weights_x = weights * x
    total, total_x = weights.sum(-1), weights_x.sum(-1)
    above_low = x - low[:, None]
    best: Floats = np.full(low.shape, np.inf, np.float32)
    scale, minimum = np.zeros_like(low), low
    for levels in firsts:
        inverse = levels / np.maximum(span, TINY)
        q = rounded(inverse[:, None], above_low, 0, 15)
        sum_q, sum_qq, sum_qx = dot(weights, q), dot(weights, q, q), dot(weights_x, q)
        spread = total * sum_qq - sum_q * sum_q
        safe = np.maximum(spread, TINY)
        slope = (total * sum_qx - total_x * sum_q) / safe
        offset = (sum_qq * total_x - sum_q * sum_qx) / safe
        above = offset > 0
        slope = np.where(above, sum_qx / np.maximum(sum_qq, TINY), slope)
        offset = np.where(above, 0, offset)
        q *= slope[:, None]
        q += offset[:, None]
        q -= x
        error = dot(weights, q, q)
        won = (spread > 0) & (error < best)
        best = np.where(won, error, best)
        scale, minimum = np.where(won, slope, scale), np.where(won, offset, minimum)
    return np.maximum(scale, 0), -minimum


def symmetric(x: Floats, weights: Floats, firsts: Floats, levels: int) -> Floats:
    """Of integers -levels to levels - 1."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[:, None], -1)
    inverse = np.divide(1, largest, out=np.zeros_like(largest), where=np.abs(largest) > TINY)
    weights_x = weights * x
    best = np.zeros(len(x), np.float32)
    scale = np.zeros_like(best)
    for first in firsts:
        q = rounded(-first * inverse, x, -levels, levels - 1)
        product, square = dot(weights_x, q), dot(weights, q, q)
        slope = np.divide(product, square, out=np.zeros_like(best), where=square > TINY)
        won = slope * product > best
        best, scale = np.where(won, slope * product, best), np.where(won, slope, scale)
    return scale


def rounded(inverse: Floats, x: Floats, least: int, most: int) -> Floats:
    """Integers nearest to x / scale."""
    q = inverse * x
    np.rint(q, out=q)
    np.clip(q, least, most, out=q)
    return q


def dot(*factors: Floats) -> Floats:
    """The sums of products along the last axis."""
    found: Floats = np.einsum(",".join(["ni"] * len(factors)) + "->n", *factors)
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what overflows
@pytest.mark.parametrize(("size", "levels"), [(32, 0), (32, 8), (32, 16), (16, 32)])
@given(
    groups=st.integers(1, 70),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0, 1, 12]),
    ties=st.booleans(),
    lowest=st.sampled_from([-np.inf, 0]),
)
def test_scales_are_those_of_numpy_to_the_bit(
    size: int, levels: int, groups: int, seed: int, spread: float, ties: bool, lowest: float
) -> None:
    """Of equal values, of none below zero, of zeros and what is close to it, and of no weight."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((groups, size)) * np.exp(spread * rng.standard_normal((groups, 1)))
    x = np.maximum(np.rint(2 * x) if ties else x, lowest).astype(np.float32)
    weights = np.square(x) + rng.random(x.shape, np.float32)
    for one in x, weights:
        one *= rng.choice(np.float32([0, 1e-33, 1e-15, 1]), (groups, 1), p=[0.1, 0.1, 0.1, 0.7])
    firsts = (levels or 15) + STEPS
    scales, minimums = searched(x, weights, firsts, levels)
    if levels:
        expected = [symmetric(x, weights, firsts, levels), np.zeros(groups, np.float32)]
    else:
        expected = [*with_minimum(x, weights, firsts)]
    for found, theirs in zip((scales, minimums), expected, strict=True):
        np.testing.assert_array_equal(found.view(np.int32), theirs.view(np.int32))
