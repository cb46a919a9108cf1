"""Frequencies by properties; their values are compared with transformers through the logits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lite_runner.config.model import ModelConfig, RopeScaling
from lite_runner.models.bloom import alibi_slopes
from lite_runner.models.rope import dynamic_exponents, frequencies

LLAMA = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    n_kv_heads=2,
    head_dim=64,
    intermediate_size=64,
    seq_length=8192,
    norm_eps=1e-5,
    tie_word_embeddings=True,
    theta=10000.0,
)


def scaled(kind: str, **fields: object) -> ModelConfig:
    return replace(LLAMA, rope_scaling=RopeScaling(kind, 4.0, 2048, **fields))


def test_unscaled_frequencies_fall_from_one_by_powers_of_the_base() -> None:
    values, factor = frequencies(LLAMA)
    assert factor == 1.0 and values.dtype == np.float32 and values.shape == (32,)
    np.testing.assert_allclose(values, 10000.0 ** (-np.arange(32) / 32), rtol=1e-6)


def test_linear_divides_all() -> None:
    np.testing.assert_allclose(frequencies(scaled("linear"))[0] * 4, frequencies(LLAMA)[0])


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_fast_frequencies_stay_and_slow_ones_are_divided(kind: str) -> None:
    base, values = frequencies(LLAMA)[0], frequencies(scaled(kind))[0]
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
    assert frequencies(scaled("yarn", **fields))[1] == pytest.approx(expected)


def test_dynamic_exponents_stretch_the_base() -> None:
    """A base b r^(D/(D-2)) gives each frequency times r to these powers."""
    ratio, dim = 3.0, 64
    stretched = (10000.0 * ratio ** (dim / (dim - 2))) ** (-np.arange(0, dim, 2) / dim)
    np.testing.assert_allclose(
        frequencies(LLAMA)[0] * ratio ** dynamic_exponents(dim), stretched, rtol=1e-5
    )


def test_alibi_slopes_of_a_power_of_two_and_between() -> None:
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-power for power in range(1, 9)])
    # The other two of the 8-head sequence with half the step, as the ALiBi paper has them.
    np.testing.assert_allclose(alibi_slopes(6)[4:], [2.0**-1, 2.0**-3])
