"""Gradients on the tape against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from lite_runner.architectures.spec import Activation, Experts, Norm
from lite_runner.training import mixture
from lite_runner.training import tape as ops
from lite_runner.training.kernels import Array, Panels, Room, product, use_threads
from lite_runner.training.tape import Slot, Tape, Value
from lite_runner.weights import narrowed, widened

GENERATOR = np.random.default_rng(0)


def drawn(*shape: int) -> Array:
    return GENERATOR.normal(size=shape).astype(np.float32)


def check(operation: Callable[..., Value], *arrays: Array) -> None:
    """Every array's gradient along a drawn direction, by central differences."""
    tape = Tape()
    values = [Value(array.copy(), Slot()) for array in arrays]
    out = operation(tape, *values)
    upstream = drawn(*out.array.shape)
    assert out.slot is not None
    out.slot.add(upstream, own=False)
    tape.backward()
    for place, array in enumerate(arrays):
        along = drawn(*array.shape)
        along /= np.linalg.norm(along)
        found = []
        for step in (1e-2, -1e-2):
            moved = [one + step * along if i == place else one for i, one in enumerate(arrays)]
            result = operation(Tape(), *(Value(one.astype(np.float32).copy()) for one in moved))
            found.append(float((result.array.astype(np.float64) * upstream).sum()))
        grad = values[place].slot
        assert grad is not None and grad.grad is not None
        computed = float((grad.grad * along).sum())
        assert computed == pytest.approx((found[0] - found[1]) / 2e-2, rel=2e-2, abs=2e-3)


def test_a_product_with_a_bias() -> None:
    check(ops.linear, drawn(5, 3), drawn(4, 3), drawn(4))


@pytest.mark.parametrize("dropped", [False, True])
def test_a_low_rank_update(dropped: bool) -> None:
    kept = (drawn(5, 3) > 0) * np.float32(2) if dropped else None

    def operation(tape: Tape, x: Value, weight: Value, a: Value, b: Value) -> Value:
        return ops.low_rank(tape, ops.linear(tape, x, weight), x, a, b, 0.7, kept)

    check(operation, drawn(5, 3), drawn(4, 3), drawn(2, 3), drawn(4, 2))


@pytest.mark.parametrize("width", [None, 3])
def test_norms(width: int | None) -> None:
    rms, layer = Norm("rms", 1e-5), Norm("layer", 1e-5)
    gain = drawn(width or 6)
    check(lambda tape, x, gain: ops.norm(tape, rms, x, gain, None, width), drawn(4, 6), gain)
    check(lambda tape, x, *both: ops.norm(tape, layer, x, *both, width), drawn(4, 6), gain, gain)


def test_rotations() -> None:
    cos, sin = drawn(5, 1, 2), drawn(5, 1, 2)
    check(lambda tape, x: ops.rotated(tape, x, cos, sin), drawn(5, 8))


@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_exact", "quick_gelu"])
def test_activations(function: Activation) -> None:
    check(lambda tape, x: ops.activated(tape, function, x), drawn(4, 6))
    check(lambda tape, x, y: ops.activated(tape, function, x, y), drawn(4, 6), drawn(4, 6))


def test_the_error_function() -> None:
    x = np.linspace(-5, 5, 101, dtype=np.float32)
    expected = np.array([math.erf(one) for one in x])
    assert np.abs(ops._erf(x) - expected).max() < 3e-7


@pytest.mark.parametrize(
    "given",
    [{}, {"softcap": 2.0}, {"window": 3}, {"slopes": np.array([0.5, 0.25, 0.1, 0.3], np.float32)}],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_attention(given: dict[str, object], threads: int) -> None:
    """Two texts, which do not see each other, one of them in more blocks of queries than one."""

    def operation(tape: Tape, *values: Value) -> Value:
        return ops.attention(tape, *values, (70, 4), head_dim=2, scale=0.8, **given)  # type: ignore[arg-type]

    use_threads(threads)
    try:
        check(operation, drawn(74, 8), drawn(74, 4), drawn(74, 4))
    finally:
        use_threads(1)


def bfloat16(array: Array) -> Array:
    return widened(narrowed(array, "BF16"))


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (5, 33, 7), (13, 70, 300), (3, 64, 0), (300, 31, 513), (20, 40, 1100)]
)
def test_products_of_any_strides(sizes: tuple[int, int, int]) -> None:
    """Rows, columns and inputs that fill a tile, a panel or a block, and that do not."""
    m, n, k = sizes
    wide = [drawn(m, 2 * k)[:, ::2], drawn(k, n)]
    for a in (wide[0], np.ascontiguousarray(wide[0]), np.asfortranarray(wide[0])):
        for b in (wide[1], np.asfortranarray(wide[1])):
            bound = 1e-5 * np.abs(a) @ np.abs(b) + 1e-30
            assert (np.abs(product(a, b) - a.astype(np.float64) @ b) <= bound).all()
            rounded = bfloat16(np.ascontiguousarray(a)).astype(np.float64) @ bfloat16(b)
            bits = narrowed(b, "BF16")
            assert (np.abs(product(a, bits) - rounded) <= bound).all()
            assert np.array_equal(product(a, Panels(b, Room())), product(a, b))


def test_a_product_has_the_same_bits_with_any_rows_and_threads() -> None:
    a, b = drawn(300, 600), drawn(600, 100)
    whole = product(a, b)
    use_threads(3)
    try:
        assert np.array_equal(product(a, b), whole)
        assert np.array_equal(product(a, Panels(b, Room())), whole)
    finally:
        use_threads(1)
    assert np.array_equal(product(a[7:8], b), whole[7:8])
    apart = product(a, b, spare=16)
    assert np.array_equal(apart, whole) and apart.strides[0] == 4 * 116
    matrix = Room().copied(np.asfortranarray(b))
    assert matrix.ctypes.data % 64 == 0 and np.array_equal(product(a, matrix), whole)


def test_rows_of_a_table_and_picked_rows() -> None:
    rows = np.array([3, 1, 3, 0])
    check(lambda tape, table: ops.rows_of(tape, table, rows), drawn(5, 3))
    check(lambda tape, x: ops.picked(tape, x, np.array([2, 0])), drawn(4, 3))


def test_sums() -> None:
    check(lambda tape, x, y: ops.add(tape, x, y, 0.5), drawn(4, 3), drawn(4, 3))
    check(lambda tape, x: ops.add(tape, x, ops.scaled(tape, x, 3.0)), drawn(4, 3))


@pytest.mark.parametrize("renormalized", [True, False])
def test_chosen_experts(renormalized: bool) -> None:
    experts = Experts(4, 2, renormalized)
    logits = np.array([[3, 1, 0, -1], [0, 2, 5, 1], [1, -4, 3, 0]], np.float32)

    def operation(tape: Tape, logits: Value, x: Value) -> Value:
        chosen, factors = mixture.routed(tape, logits, experts)
        parts = []
        for expert in range(4):
            rows, place = np.nonzero(chosen == expert)
            part = ops.scaled(tape, ops.picked(tape, x, rows), expert + 1.5)
            parts.append((rows, place, part))
        return mixture.gathered(tape, x.array.shape, parts, factors)

    check(operation, logits, drawn(3, 5))


@pytest.mark.parametrize("given", [{}, {"scaling": 3.0, "softcap": 2.0}])
def test_cross_entropy(given: dict[str, float]) -> None:
    targets = np.array([1, 4, 0])

    def loss(x: Array, head: Array) -> float:
        return ops.cross_entropy(Value(x), Value(head), targets, 0.5, **given)

    x, head = drawn(3, 4), drawn(6, 4)
    values = Value(x, Slot()), Value(head, Slot())
    ops.cross_entropy(*values, targets, 0.5, **given)
    for place in (0, 1):
        along = drawn(*(x, head)[place].shape)
        steps = [(one * along, 0) if place == 0 else (0, one * along) for one in (5e-3, -5e-3)]
        above, below = (
            loss((x + to_x).astype(np.float32), (head + to_head).astype(np.float32))
            for to_x, to_head in steps
        )
        difference = (above - below) / 1e-2
        slot = values[place].slot
        assert slot is not None and slot.grad is not None
        assert float((slot.grad * along).sum()) == pytest.approx(0.5 * difference, rel=2e-2)
