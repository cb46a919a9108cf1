"""The layers but attention, against NumPy in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.native import matrices, packing
from lite_runner.native.structs import Activation, NormValues, aligned
from tests.native.in_numpy import (
    CLOSE,
    Floats,
    Wide,
    a_matrix,
    a_norm,
    close,
    feed_forward_fields,
    normed,
    step_words,
    values,
)

CAPACITY = 500


@dataclass(frozen=True)
class FeedForward:
    """The differences between the layers of the test."""

    gated: bool
    centred: bool
    bias: bool
    hidden: int
    wide: int
    kind: str


feed_forwards = st.builds(
    FeedForward,
    hidden=st.sampled_from([1, 8, 40, 64]),
    wide=st.sampled_from([1, 31, 32, 33, 64, 100, 160]),
    kind=st.sampled_from(["float32", "float16", "int8", "int4"]),
)
row_counts = st.one_of(st.integers(1, 5), st.integers(1, 70))


def test_feed_forward(operators: Any) -> None:
    @given(layer=feed_forwards, count=row_counts, threads=st.sampled_from([1, 2, 5]))
    def check(layer: FeedForward, count: int, threads: int) -> None:
        rng = np.random.default_rng(layer.wide)
        operators.set_threads(threads)
        hidden, wide = layer.hidden, layer.wide
        norm = a_norm(hidden, layer.centred, rng)
        ups = [a_matrix(wide, hidden, layer.kind, rng) for _ in range(1 + layer.gated)]
        down = a_matrix(hidden, wide, layer.kind, rng)
        gate_bias, up_bias = (rng.standard_normal(wide, np.float32) for _ in range(2))
        down_bias = rng.standard_normal(hidden, np.float32)
        if layer.gated:
            both = matrices.Alternating(*ups)
            upward = matrices.matrix(both, (gate_bias, up_bias) if layer.bias else None)
        else:
            upward = matrices.matrix(ups[0], gate_bias if layer.bias else None)
        block = packing.feed_forward(
            feed_forward_fields(hidden, wide, layer.gated),
            upward,
            matrices.matrix(down, down_bias if layer.bias else None),
            norm,
        ).block()
        x = np.full((CAPACITY, hidden), np.nan, np.float32)
        x[:count] = rng.standard_normal((count, hidden), np.float32)
        step = step_words(CAPACITY, np.zeros(count), np.arange(count))
        result = operators.layer(block, step, x)
        assert np.isnan(result[count:]).all()
        inner = [normed(x[:count], norm) @ values(up).T for up in ups]
        if layer.bias:
            inner = [one + bias for one, bias in zip(inner, (gate_bias, up_bias), strict=False)]
        middle = silu(inner[0]) * inner[1] if layer.gated else gelu(inner[0])
        expected = middle @ values(down).T
        expected = expected + down_bias if layer.bias else expected
        expected = expected + x[:count]
        room = close(layer.kind) * (1 + abs(expected).max())
        np.testing.assert_allclose(result[:count], expected, rtol=0, atol=room)
        # The last row is the same alone.
        last = np.ascontiguousarray(x[count - 1 : count])
        step = step_words(1, np.zeros(1), np.zeros(1))
        alone = operators.layer(block, step, last)
        np.testing.assert_array_equal(alone[0], result[count - 1])

    check()


def silu(x: Wide) -> Wide:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def gelu(x: Wide) -> Wide:
    """x (1 + tanh(a)) / 2, in a form that keeps its digits where that is near 0."""
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def activations(
    operators: Any, inputs: Floats, gated: bool, function: Activation | None = None
) -> Floats:
    """silu(inputs), gelu(inputs) or another function of them, through a layer whose only weights
    are ones that pass on what becomes of its biases."""
    size = len(inputs)
    zeros = np.zeros((size, size), np.float32)
    fields = feed_forward_fields(size, size, gated)
    if function is not None:
        fields.activation = function
    block = packing.feed_forward(
        fields,
        matrices.matrix(matrices.Alternating(zeros, zeros), (inputs, np.ones_like(inputs)))
        if gated
        else matrices.matrix(zeros, inputs),
        matrices.matrix(np.eye(size, dtype=np.float32)),
        NormValues(np.ones(size, np.float32), None, 1.0),
    ).block()
    x, step = np.zeros((1, size), np.float32), step_words(1, np.zeros(1), np.zeros(1))
    result: Floats = operators.layer(block, step, x)[0]
    return result


@pytest.mark.parametrize("gated", [True, False])
def test_activations_are_accurate(operators: Any, gated: bool) -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-6, 0.1, 1.0, 8.0, 80.0, 1e4):
        x = (rng.standard_normal(1024) * scale).astype(np.float32)
        wide = x.astype(np.float64)
        exact = silu(wide) if gated else gelu(wide)
        error = abs(activations(operators, x, gated) - exact)
        # e^a takes over the rounding of a, which is some digits of it where a is large. What is
        # below 1e-30 counts as nothing.
        inner = abs(wide) if gated else abs(2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))
        units = 4 if gated else 4 + 3 * np.minimum(inner, 88) * (wide < 0)
        assert (error <= units * 2.0**-23 * abs(exact) + 1e-30).all()


def test_other_activations_are_accurate(operators: Any) -> None:
    x = np.concatenate([np.linspace(-12, 12, 1023), [1e4]]).astype(np.float32)
    wide = x.astype(np.float64)
    normal = np.vectorize(lambda one: 0.5 * math.erfc(-one / math.sqrt(2)))(wide)
    quick = activations(operators, x, False, Activation.QUICK_GELU)
    expected = wide / (1 + np.exp(-1.702 * wide))
    units = 4 + 3 * 1.702 * abs(wide) * (wide < 0)  # see above
    assert (abs(quick - expected) <= units * 2.0**-23 * abs(expected)).all()
    exact = activations(operators, x, False, Activation.GELU_EXACT)
    assert (abs(exact - wide * normal) <= 4e-7 * abs(wide)).all()


@pytest.mark.parametrize("gated", [True, False])
def test_activations_of_extremes(operators: Any, gated: bool) -> None:
    for value, expected in ((1e4, 1e4), (3e38, 3e38), (np.inf, np.inf), (-1e4, 0), (0, 0)):
        found = activations(operators, np.float32([value]), gated)
        np.testing.assert_allclose(found, np.float32([expected]), rtol=1e-6, atol=1e-30)
    assert np.isnan(activations(operators, np.float32([np.nan]), gated)).all()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["float32", "int8", "integers"])
def test_no_number_reaches_the_output_of_its_row(operators: Any, kind: str, gated: bool) -> None:
    rng = np.random.default_rng(0)
    ups = [a_matrix(40, 32, kind.replace("integers", "int8"), rng) for _ in range(1 + gated)]
    down = a_matrix(32, 40, kind.replace("integers", "int8"), rng)
    block = packing.feed_forward(
        feed_forward_fields(32, 40, gated),
        matrices.matrix(
            matrices.Alternating(*ups) if gated else ups[0], rounded_input=kind == "integers"
        ),
        matrices.matrix(down, rounded_input=kind == "integers"),
        a_norm(32, False, rng),
    ).block()
    x = rng.standard_normal((7, 32), np.float32)
    step = step_words(7, np.zeros(7), np.arange(7))
    before = operators.layer(block, step, x)
    x[3, 5] = np.nan
    after = operators.layer(block, step, x)
    assert np.isnan(after[3]).all()
    np.testing.assert_array_equal(np.delete(after, 3, 0), np.delete(before, 3, 0))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_embedding(operators: Any, kind: str) -> None:
    for positions, centred, hidden in itertools.product(
        (False, True), (None, False, True), (8, 33, 64)
    ):
        rng = np.random.default_rng(hidden)
        table = a_matrix(101, hidden, kind, rng)
        places = rng.standard_normal((50, hidden), np.float32) if positions else None
        norm = None if centred is None else a_norm(hidden, centred, rng)
        block = packing.embedding(matrices.matrix(table), places, norm, None, hidden=hidden).block()
        tokens, at = rng.integers(0, 101, 23), rng.integers(0, 50, 23)
        step = step_words(40, np.zeros(23), at, tokens)
        result = operators.embedding(block, step, (40, hidden))
        assert np.isnan(result[23:]).all()
        rows = values(table)[tokens]
        rows = rows if places is None else rows + places[at]
        if norm is None:
            np.testing.assert_allclose(result[:23], rows, rtol=3e-7, atol=1e-6)
        else:
            expected = normed(rows, norm)
            np.testing.assert_allclose(result[:23], expected, rtol=0, atol=CLOSE)
        if norm is None and places is None and kind != "int4":
            np.testing.assert_array_equal(result[:23], rows.astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "tied", "centred"),
    [
        ("float32", False, False),
        ("float32", True, True),
        ("int8", False, True),
        ("int8", True, False),
        ("int4", False, False),
        ("int4", True, True),
    ],
)
def test_head(operators: Any, kind: str, tied: bool, centred: bool) -> None:
    rng = np.random.default_rng(0)
    hidden, vocab, count = 64, 101, 23
    weight, norm = a_matrix(vocab, hidden, kind, rng), a_norm(hidden, centred, rng)
    matrix = matrices.matrix(weight)
    first = packing.embedding(matrix, None, None, None, hidden=hidden).block()
    head = packing.head(None if tied else matrix, norm, None, hidden=hidden).block()
    tokens = rng.integers(0, vocab, count)
    x = rng.standard_normal((count, hidden), np.float32)
    if tied:
        x = values(weight)[tokens].astype(np.float32)

    def logits(wanted: tuple[int, ...]) -> Floats:
        step = step_words(40, np.zeros(count), np.arange(count), tokens, wanted)
        if not tied:
            return operators.head(head, step, np.pad(x, ((0, 17), (0, 0))), vocab)
        layers = [(first, ()), (head, ())]
        return operators.step(layers, step, (40, hidden), logits=(len(wanted), vocab))[1]

    alone = [logits((row,))[0] for row in range(count)]
    for wanted in ((0,), (22,), (4, 0, 4, 21), tuple(range(count))):
        result = logits(wanted)
        expected = normed(x[list(wanted)], norm) @ values(weight).T
        room = close(kind) * (1 + abs(expected).max())
        np.testing.assert_allclose(result, expected, rtol=0, atol=room)
        np.testing.assert_array_equal(result, np.array([alone[row] for row in wanted]))


def test_a_layer_of_an_unknown_kind_is_refused(operators: Any) -> None:
    block, x = aligned(512), np.zeros((1, 8), np.float32)
    block[0] = 99
    with pytest.raises(ValueError, match="not computed"):
        operators.layer(block, step_words(1, np.zeros(1), np.zeros(1)), x)
