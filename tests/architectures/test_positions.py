"""Frequencies by properties; their values are compared with transformers through the logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures.positions import alibi_slopes, dynamic_exponents, frequencies
from lite_runner.architectures.spec import RopeScaling, Rotary

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


def test_alibi_slopes_of_a_power_of_two_and_between() -> None:
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-power for power in range(1, 9)])
    # The other two of the 8-head sequence with half the step, as the ALiBi paper has them.
    np.testing.assert_allclose(alibi_slopes(6)[4:], [2.0**-1, 2.0**-3])
