"""Frequencies by properties; their values are compared with transformers through the logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures.positions import (
    PromptPrefix,
    RotaryAngles,
    TwoDimensionalAngles,
    alibi_slopes,
    cos_sin,
    dynamic_exponents,
    frequencies,
    last_seen,
    positions_of,
    prefix_error,
)
from lite_runner.architectures.spec import Prefix, RopeScaling, Rotary

HEAD_DIM = 64


def of(rotary: Rotary) -> tuple[NDArray[np.float32], float]:
    return frequencies(rotary, HEAD_DIM)


def scaled(kind: str, **fields: object) -> Rotary:
    return Rotary(scaling=RopeScaling(kind, 4.0, 2048, **fields))  # type: ignore[arg-type]


def test_unscaled_frequencies_fall_from_one_by_powers_of_the_base() -> None:
    values, factor = of(Rotary())
    assert factor == 1.0 and values.dtype == np.float32 and values.shape == (32,)
    np.testing.assert_allclose(values, 10000.0 ** (-np.arange(32) / 32), rtol=1e-6)


def test_linear_divides_all() -> None:
    np.testing.assert_allclose(of(scaled("linear"))[0] * 4, of(Rotary())[0])


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_fast_frequencies_stay_and_slow_ones_are_divided(kind: str) -> None:
    base, values = of(Rotary())[0], of(scaled(kind))[0]
    np.testing.assert_allclose(values[0], base[0], rtol=1e-6)
    np.testing.assert_allclose(values[-1], base[-1] / 4, rtol=1e-6)
    assert (np.diff(values) < 0).all()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
    ],
)
def test_yarn_scales_the_scores(fields: dict[str, float], expected: float) -> None:
    assert of(scaled("yarn", **fields))[1] == pytest.approx(expected)


def test_dynamic_exponents_stretch_the_base() -> None:
    """A base b r^(D/(D-2)) gives each frequency times r to these powers."""
    ratio, dim = 3.0, 64
    stretched = (10000.0 * ratio ** (dim / (dim - 2))) ** (-np.arange(0, dim, 2) / dim)
    np.testing.assert_allclose(
        of(Rotary())[0] * ratio ** dynamic_exponents(dim), stretched, rtol=1e-5
    )


def test_longrope_takes_the_long_frequencies_beyond_the_original_length() -> None:
    halves = {"short_factor": (1.0,) * 32, "long_factor": (2.0,) * 32, "attention_factor": 1.0}
    angles = RotaryAngles(scaled("longrope", **halves), HEAD_DIM)
    _, sin = angles.scaled(np.array([4, 4]), np.array([2048, 2049]))
    base = of(Rotary())[0]
    np.testing.assert_allclose(sin, np.sin([4 * base, 2 * base]), rtol=1e-5)


def test_alibi_slopes_of_a_power_of_two_and_between() -> None:
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-power for power in range(1, 9)])
    # The other two of the 8-head sequence with half the step, as the ALiBi paper has them.
    np.testing.assert_allclose(alibi_slopes(6)[4:], [2.0**-1, 2.0**-3])


PREFIX = Prefix(124, (121, 120))


# What MindFormers 1.0.2 has for them.
@pytest.mark.parametrize(
    ("tokens", "positions", "blocks"),
    [
        ([5, 74, 121, 124], [0, 1, 2, 2], [0, 0, 0, 1]),
        ([33, 5, 6, 121, 8, 9, 124], [0, 1, 2, 3, 4, 5, 3], [0] * 6 + [1]),
        ([33, 121, 7, 124, 9, 30], [0, 1, 2, 1, 1, 1], [0, 0, 0, 1, 2, 3]),
        ([14, 15, 120, 16, 124], [0, 1, 2, 3, 2], [0, 0, 0, 0, 1]),
        ([14, 120, 15, 121, 18, 121, 124, 20], [0, 1, 2, 3, 4, 5, 3, 3], [0] * 6 + [1, 2]),
        ([50, 121, 124, 52, 124, 55], [0, 1, 1, 1, 1, 1], [0, 0, 1, 2, 3, 4]),
    ],
)
def test_positions(tokens: list[int], positions: list[int], blocks: list[int]) -> None:
    found = PromptPrefix.of(PREFIX, np.array(tokens))
    assert found.length == tokens.index(124)
    index, length, mask = np.arange(len(tokens)), np.array(found.length), np.array(found.mask)
    got = positions_of(index, length, mask)
    assert [one.tolist() for one in got] == [positions, blocks]
    seen = [max(one, found.length - 1) for one in range(len(tokens))]
    assert last_seen(index, length).tolist() == seen


def test_without_its_marks_a_prompt_has_no_prefix() -> None:
    assert PromptPrefix.of(PREFIX, np.array([5, 6, 7])) == PromptPrefix(0, 0)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([5, 121, 124], None),
        ([5, 121], "has no token 124 (sop), which ends the prefix"),
        ([5, 124, 121], "has no token 121 or 120 (a mask) before its token 124 (sop)"),
    ],
)
def test_prompt_without_prefix(tokens: list[int], message: str | None) -> None:
    assert prefix_error(PREFIX, tokens) == message


def test_tables_are_float16() -> None:
    angles = TwoDimensionalAngles(Rotary(two_dimensional=True), 16, 100)
    cos, sin = angles.of(np.array([0, 7]), np.array([3, 100]))
    assert cos.shape == sin.shape == (2, 8)
    assert np.array_equal(cos[0, :4], np.ones(4)) and np.array_equal(sin[0, :4], np.zeros(4))
    exact = np.cos(100 * 10000.0 ** -(np.arange(4) / 4))
    assert (
        np.array_equal(cos, cos.astype(np.float16)) and 0 < np.abs(cos[1, 4:] - exact).max() < 0.1
    )


def test_cosines_that_are_the_same_on_every_processor() -> None:
    """The nearest float32, of angles of far positions too."""
    positions = np.arange(0, 1 << 20, 1013, dtype=np.float32)
    angles = np.outer(positions, np.array([1, 0.5, 0.013], np.float32))
    cos, sin = cos_sin(angles)
    assert np.array_equal(cos, np.cos(angles.astype(np.float64)).astype(np.float32))
    assert np.array_equal(sin, np.sin(angles.astype(np.float64)).astype(np.float32))
