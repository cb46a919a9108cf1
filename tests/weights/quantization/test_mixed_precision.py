from __future__ import annotations

import math

import numpy as np
import pytest

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.quantization import Quantization, Scheme
from lite_runner.architectures.reference import forward
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.quantization.mixed_precision import finer_matrices, measured_costs
from lite_runner.weights.quantization.quantized import quantize
from tests.paths import REFERENCE
from tests.weights.quantization.test_gptq import TEXTS

FOUR = Quantization("a16w4", 32)


def distribution(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


@pytest.mark.parametrize("case", ["llama_biases", "mixtral", "gemma2"])
def test_costs_of_a_layer_are_the_divergence_of_the_whole_model(case: str) -> None:
    model = model_config_of(REFERENCE / case)
    assert model is not None
    tensors, texts = open_checkpoint(REFERENCE / case, model), TEXTS[:2] % 40
    costs = measured_costs(tensors, model, FOUR, texts, around_zero=False)
    arrays = {name: one.float32() for name, one in tensors.items()}
    exact = [distribution(forward(model, arrays, text)) for text in texts]
    for layer in range(model.num_layers):
        ours = {units: cost for units, cost in costs.items() if units[0].layer == layer}
        roles = {tuple(sorted({str(one.role) for one in units})) for units in ours}
        assert (
            ("key", "query", "value") in roles and ("attention_out",) in roles and len(roles) == 4
        )
        changed = dict(arrays)
        for one in (one for units in ours for one in units):
            values = arrays[one.name].T if one.transposed else arrays[one.name]
            found = quantize(values, 4, 32).float32()
            changed[one.name] = found.T if one.transposed else found
        divergence = 0.0
        for text, right in zip(texts, exact, strict=True):
            other = distribution(forward(model, changed, text))
            divergence += float((np.exp(right) * (right - other)).sum())
        assert sum(ours.values()) == pytest.approx(divergence, rel=0.05) and divergence > 0
        assert min(ours.values()) > 0


def test_the_dearest_errors_have_8_bits_within_the_target() -> None:
    model = model_config_of(REFERENCE / "llama")
    assert model is not None
    linear = [one for one in parameters(model) if one.is_linear and one.layer is not None]
    costs: dict[tuple[Parameter, ...], float] = {
        (one,): math.prod(one.shape) * (index + 1.0) for index, one in enumerate(linear)
    }
    four, eight = Scheme(4, 32), Scheme(8, 32)
    assert finer_matrices(costs, four, eight, 5) == ()
    assert len(finer_matrices(costs, four, eight, 8.5)) == len(linear)
    for bits in (5.5, 6, 7):
        found = finer_matrices(costs, four, eight, bits)
        weights = sum(math.prod(one.shape) for one in linear)
        size = sum(
            (eight if one.name in found else four).nbytes(*one.shape[::-1]) for one in linear
        )
        assert bits - 0.6 <= 8 * size / weights <= bits
        assert linear[-1].name in found and linear[0].name not in found
