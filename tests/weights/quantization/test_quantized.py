from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lite_runner.architectures.quantization import Scheme
from lite_runner.errors import ArtifactError
from lite_runner.weights.quantization.quantized import (
    packed,
    quantize,
    quantize_around_zero,
    quantize_rows,
    unpacked,
)
from tests.each import each

FORMS = [(8, 0), (8, 32), (4, 32), (4, 64), (4, 128)]
# Numbers of every size that float16 scales can hold, equal ones and zeros among them.
NUMBERS = st.floats(-1000, 1000, width=32) | st.sampled_from([0.0, 1.0, -(2.0**-20), 2.0**-100])


@st.composite
def matrices(draw: st.DrawFn, columns: int = 128) -> np.ndarray:
    rows = draw(st.integers(1, 3))
    return draw(hnp.arrays(np.float32, (rows, columns), elements=NUMBERS, fill=NUMBERS))


def spread(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The scale (or minimum) of each value."""
    groups = scales.reshape(shape[0], -1).astype(np.float64)
    return groups.repeat(shape[1] // groups.shape[1], axis=1)


@pytest.mark.parametrize(("bits", "group"), FORMS)
@given(weight=matrices())
def test_values_are_within_half_a_step(bits: int, group: int, weight: np.ndarray) -> None:
    found = quantize(weight, bits, group)
    error = np.abs(found.float32().astype(np.float64) - weight)
    largest = np.abs(weight.reshape(len(weight), -1, group or 128)).max(-1)
    # float16 keeps 11 bits of a scale or a minimum; below 6e-5 a fixed step of 6e-8, of each of
    # which there may be 127.
    rounding = spread(largest, weight.shape) * (2**-10 if group else 2**-20)
    rounding += 127 * 2**-24 if group else 1e-36
    if bits == 8:
        assert np.all(error <= spread(found.scales, weight.shape) / 2 + rounding)
    else:  # fitted scales leave single values further off, but no group as a whole
        grouped = weight.reshape(-1, group).astype(np.float64)
        bound = (np.ptp(grouped, axis=1) / 30 + rounding.reshape(-1, group).max(1)) ** 2 * group
        assert np.all((error.reshape(-1, group) ** 2).sum(1) <= bound)
    assert found.shape == weight.shape
    assert found.nbytes == Scheme(bits, group).nbytes(*weight.shape)


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_dequantization_follows_the_docstring(bits: int, group: int) -> None:
    weight = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)
    found = quantize(weight, bits, group)
    if bits == 8:
        assert found.values.dtype == np.int8 and found.minimums is None
        assert np.abs(found.values.astype(int)).max() == 127  # -128 is never used
        q = found.values.astype(np.float64)
        low = 0.0
    else:
        assert found.values.dtype == np.uint8 and found.minimums is not None
        assert found.values.shape == (5, 128) and found.minimums.dtype == np.float16
        q = np.empty((5, 256))
        q[:, 0::2], q[:, 1::2] = found.values & 15, found.values >> 4
        low = spread(found.minimums, weight.shape)
    assert found.scales.dtype == (np.float16 if group else np.float32)
    assert found.scales.shape == ((5, 256 // group) if group else (5,))
    expected = spread(found.scales, weight.shape) * q + low
    np.testing.assert_allclose(found.float32(), expected, rtol=1e-6, atol=1e-6)


@given(hnp.arrays(np.uint8, (3, 64), elements=st.integers(0, 15)))
def test_nibbles(q: np.ndarray) -> None:
    both = packed(q)
    np.testing.assert_array_equal(both & 15, q[:, 0::2])
    np.testing.assert_array_equal(both >> 4, q[:, 1::2])
    np.testing.assert_array_equal(unpacked(both), q)


def test_rows_in_pieces_are_the_whole() -> None:
    weight = np.random.default_rng(2).standard_normal((4099, 256)).astype(np.float32)
    for bits, group in FORMS:
        whole = quantize(weight, bits, group)
        pieces = (weight[i : i + 1000] for i in range(0, 4099, 1000))
        found = quantize_rows(pieces, (4099, 256), Scheme(bits, group), "w")
        np.testing.assert_array_equal(found.values, whole.values)
        np.testing.assert_array_equal(found.float32(), whole.float32())


@each(("bits", "group"), FORMS)
@each("value", [0.0, 3.25, -0.5])
def test_equal_values(bits: int, group: int, value: float) -> None:
    weight = np.full((2, 128), value, np.float32)
    np.testing.assert_allclose(quantize(weight, bits, group).float32(), weight, rtol=1e-3)


@given(
    scale=st.floats(2**-10, 8, width=16),
    low=st.floats(-60, 60, width=16),
    q=hnp.arrays(np.uint8, 32, elements=st.integers(0, 15)),
)
def test_a_block_of_four_bits_comes_back(scale: float, low: float, q: np.ndarray) -> None:
    q[:2] = 0, 15  # as whoever made the block has used all of its range
    block = (np.float32(scale) * q + np.float32(low)).astype(np.float32)[None]
    found = quantize(block, 4, 32)
    np.testing.assert_allclose(found.float32(), block, rtol=0, atol=1e-3 * scale * 15)


@each(("bits", "group"), FORMS)
@each("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(bits: int, group: int, value: float) -> None:
    weight = np.ones((3, 128), np.float32)
    weight[2, 77] = value
    with pytest.raises(ArtifactError, match=r"blk\.3: values that are not finite"):
        quantize(weight, bits, group, "blk.3")


def test_values_too_large_for_float16_scales_are_refused() -> None:
    weight = np.full((1, 128), 1e6, np.float32)
    assert quantize(weight, 8, 0).float32()[0, 0] == np.float32(1e6)
    with pytest.raises(ArtifactError, match="too large for the float16 scales"):
        quantize(weight, 4, 32)


def test_a_group_that_does_not_divide_the_columns() -> None:
    weight = np.ones((2, 96), np.float32)
    with pytest.raises(
        ArtifactError, match=r"w2: 96 columns, expected a multiple of .* 64"
    ) as raised:
        quantize(weight, 4, 64, "w2")
    assert raised.value.hint == "quant_group=32"
    with pytest.raises(ArtifactError) as raised:
        quantize(weight[:, :40], 4, 32)
    assert "quant=a16w8" in raised.value.hint


def test_rows_move_together() -> None:
    weight = np.random.default_rng(3).standard_normal((6, 64)).astype(np.float32)
    order = np.array([5, 0, 3, 1])
    for bits, group in ((8, 0), (8, 32), (4, 64)):
        found = quantize(weight, bits, group)
        moved = found.with_rows(lambda array: array[order])
        np.testing.assert_array_equal(moved.float32(), found.float32()[order])


def test_integers_around_zero() -> None:
    weight = np.random.default_rng(0).standard_normal((9, 128)).astype(np.float32)
    weight[3, :32] = 0
    weight[4, 5] = 40
    found = quantize_around_zero(weight, 32)
    assert (found.zero, found.minimums, found.zeros) == (8, None, None)
    numbers = unpacked(np.asarray(found.values)).reshape(9, 4, 32).astype(np.float32) - 8
    expected = (numbers * found.scales[..., None].astype(np.float32)).reshape(9, 128)
    np.testing.assert_array_equal(found.float32(), expected)
    np.testing.assert_array_equal(found.smallest, -8 * found.scales.astype(np.float32))
    assert not found.float32()[3, :32].any() and abs(found.float32()[4, 5] - 40) < 1
    # Closer than with the largest at the end of the range, whatever the group.
    steps = np.abs(weight.reshape(9, 4, 32)).max(-1, keepdims=True) / 7
    plain = np.rint(weight.reshape(9, 4, 32) / np.where(steps > 0, steps, 1)) * steps
    ours, theirs = (
        np.square(one.reshape(9, 4, 32) - weight.reshape(9, 4, 32)).sum(-1)
        for one in (found.float32(), plain)
    )
    assert (ours <= theirs * 1.01).all() and ours.sum() < 0.95 * theirs.sum()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_values_that_no_group_around_zero_holds(value: float) -> None:
    weight = np.ones((3, 32), np.float32)
    weight[1, 7] = value
    with pytest.raises(ArtifactError, match="not finite, or too large for the float16 scales"):
        quantize_around_zero(weight, 32)
