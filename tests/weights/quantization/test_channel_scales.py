from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lite_runner.architectures import Parameter
from lite_runner.architectures.reference import forward
from lite_runner.architectures.spec import Decoder
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.quantization.calibration import Inputs, Layer, layers_on
from lite_runner.weights.quantization.channel_scales import (
    POWERS,
    Scaling,
    _migrated,
    _searched,
    scale_channels,
)
from lite_runner.weights.quantization.quantized import QuantizedTensor, quantize
from tests.paths import REFERENCE
from tests.weights.quantization.test_gptq import TEXTS


def nearest(values: np.ndarray, name: str, squares: np.ndarray, group: int = 4) -> QuantizedTensor:
    return quantize(values, 4, group, name, squares)


def opened(case: str) -> tuple[Decoder, dict[str, LazyTensor]]:
    model = model_config_of(REFERENCE / case)
    assert model is not None
    return model, dict(open_checkpoint(REFERENCE / case, model))


def scaled(
    case: str, method: Scaling, fixed: tuple[str, ...] = ()
) -> Iterator[tuple[Layer, set[Parameter]]]:
    """Each layer, and the changed tensors."""
    model, tensors = opened(case)
    for index, (layer, _) in enumerate(layers_on(tensors, model, TEXTS % 40, whole=True)):
        yield layer, scale_channels(layer, model, index, method, nearest, np.matmul, fixed)


# Of a layer: how many tensors each method changes.
CHANGED = {
    **{"llama": (9, 7), "qwen2": (10, 7), "gpt2": (10, 8), "gemma2": (9, 7), "granite": (9, 7)},
    **{"mixtral": (5, 4), "cohere": (8, 6), "phi": (8, 6), "olmo2": (4, 0), "glm4": (9, 7)},
}


@pytest.mark.parametrize("case", CHANGED)
@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_a_model_with_scaled_channels_computes_the_same(case: str, method: Scaling) -> None:
    model, tensors = opened(case)
    arrays = {name: one.float32() for name, one in tensors.items()}
    expected = forward(model, arrays, TEXTS[0] % 40)
    for layer, changed in scaled(case, method):
        assert len(changed) == CHANGED[case][method == "smoothquant"]
        for one in changed:
            values = layer.values(one)
            arrays[one.name] = values.T if one.transposed else values
    found = forward(model, arrays, TEXTS[0] % 40)
    differs = abs(found - expected).max() / abs(expected).max()
    assert differs <= 1e-5 and (differs > 0) == bool(CHANGED[case][method == "smoothquant"])


class OneMatrix:
    """A layer of one matrix, behind a norm."""

    def __init__(self, values: np.ndarray, rows: np.ndarray) -> None:
        self.inputs, self._values = Inputs(values.shape[1], True, np.matmul), values
        self.inputs.add(rows, rows)
        self.place = SimpleNamespace(
            after=[SimpleNamespace(name="w")], shared=lambda one: one, repeated=lambda one: one
        )

    def values(self, parameter: object) -> np.ndarray:
        return self._values


def weight_and_rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    sizes = np.exp(rng.normal(0, 1.2, 96)).astype(np.float32)
    rows = rng.standard_normal((400, 96)).astype(np.float32) * sizes
    return rng.standard_normal((64, 96)).astype(np.float32), rows


def test_scales_of_awq_are_those_whose_outputs_err_least() -> None:
    """As in llm-compressor: powers of the inputs' sizes, divided by the root of the largest times
    the smallest, each tried on the outputs themselves."""
    weight, rows = weight_and_rows()
    layer: Any = OneMatrix(weight, rows)
    whole = partial(nearest, group=96)
    found = _searched(layer.place, layer, layer.inputs, whole, np.matmul)
    sizes, errors = np.sqrt(np.square(rows.astype(np.float64)).mean(0)), []
    for power in POWERS:
        scales = sizes**power / np.sqrt((sizes**power).max() * (sizes**power).min())
        squares = np.square(rows / scales).sum(0)
        ours = whole((weight * scales).astype(np.float32), "w", squares).float32() / scales
        errors.append(np.square(rows @ (ours - weight).T).sum())
        if errors[-1] == min(errors):
            best = scales
    np.testing.assert_allclose(found, best, rtol=1e-5)
    assert min(errors) < 0.9 * errors[0] and len(set(errors)) == len(POWERS)


@pytest.mark.parametrize("size", [1, 1e-6])
def test_smoothquant_makes_inputs_as_even_as_weights(size: float) -> None:
    weight, rows = (np.float32(size) * one for one in weight_and_rows())
    layer: Any = OneMatrix(weight, rows)
    found = _migrated(layer.place, layer, layer.inputs)
    np.testing.assert_allclose(found, np.sqrt(abs(rows).max(0) / abs(weight).max(0)), rtol=1e-5)
    np.testing.assert_allclose(abs(rows / found).max(0), abs(weight * found).max(0), rtol=1e-4)


def test_channels_of_fixed_matrices_are_unchanged() -> None:
    fixed = tuple(name for name in opened("llama")[1] if "feed_forward" in name)
    for _, changed in scaled("llama", "awq", fixed):
        assert {one.role for one in changed} == {
            *("attention_norm", "query", "key", "value", "attention_out")
        }
