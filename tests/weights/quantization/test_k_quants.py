"""Blocks of GGUF from floats, as the gguf package reads them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from lite_runner.training.kernels import searched
from lite_runner.weights.quantization.k_quants import blocks_of


@pytest.mark.parametrize(
    ("kind", "largest", "bits"),
    [("Q4_K", 0.073, 4.5), ("Q5_0", 0.0415, 5.5), ("Q6_K", 0.018, 6.5625)],
)
def test_blocks_are_close_to_the_floats(kind: str, largest: float, bits: float) -> None:
    """Closer than without a search: of Q5_0 the gguf library's error is 0.043, of Q4_1 0.078."""
    values = np.random.default_rng(0).standard_normal((16, 1024)).astype(np.float32)
    blocks = blocks_of(values, kind, searched)
    assert blocks.shape == (16, 1024 * bits / 8)
    found = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.sqrt(((found - values) ** 2).mean()) < largest


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_values_that_are_blocks_already(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    values[0], values[1], values[2, :32] = 0, np.abs(values[1]), 0
    type = gguf.GGMLQuantizationType[kind]
    once = gguf.quants.dequantize(blocks_of(values, kind, searched), type)
    assert not once[0].any() and not once[2, :32].any() and np.isfinite(once).all()
    again = gguf.quants.dequantize(blocks_of(once, kind, searched), type)
    np.testing.assert_allclose(again, once, atol=0.01 * np.abs(once).max())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q6_K"])
def test_importance_weighs_errors(kind: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((16, 1024)).astype(np.float32)
    importance = np.exp(2 * rng.standard_normal(1024)).astype(np.float32)

    def errors(given: np.ndarray | None) -> np.ndarray:
        blocks = blocks_of(values, kind, searched, given)
        found = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        return np.asarray(np.square(found - values).mean(0))

    plain = errors(None)
    assert (errors(importance) @ importance) < 0.95 * (plain @ importance)
    # Inputs that a text never has say nothing: of an expert, or of whole groups.
    importance[:512] = 0
    assert errors(importance)[:512].mean() < 1.5 * plain.mean()
    assert errors(np.zeros_like(importance)).mean() < 1.5 * plain.mean()
