"""Learned keys that a small network computes: with context.reproducible by exact operations."""

from __future__ import annotations

import math

import numpy as np

from lite_runner.architectures import architecture_of, parameters
from lite_runner.model.learned_keys import learned_keys
from lite_runner.weights import LazyTensor
from tests.each import each
from tests.models import reference_model


@each("case", ["llama", "glm4"])
def test_reproducible_keys_are_those_of_exact_operations(case: str) -> None:
    model = reference_model(case)
    width, inner = 2 * model.num_layers * model.n_kv_heads * model.head_dim, 24
    draw = np.random.default_rng(1).standard_normal
    shapes = {
        "embedding.embedding_table": (3, width),
        "trans.0.weight": (inner, width),
        "trans.0.bias": (inner,),
        "trans.2.weight": (width, inner),
        "trans.2.bias": (width,),
    }
    arrays = {name: draw(shape, np.float32) * np.float32(0.1) for name, shape in shapes.items()}
    tensors = {name: LazyTensor(one.shape, "F32", one.copy) for name, one in arrays.items()}
    found = learned_keys(tensors, model, reproducible=True)
    np.testing.assert_allclose(found, learned_keys(tensors, model), rtol=1e-5, atol=1e-6)

    key = next(one for one in parameters(model) if one.role == "key")
    rows = architecture_of(model).stored_rows(key, model)
    assert isinstance(rows, np.ndarray) == (case == "glm4")
    table, first, bias, second, last = (one.tolist() for one in arrays.values())
    for row, learned in zip(table, np.moveaxis(found, 3, 0), strict=True):
        hidden = [
            np.float32(math.tanh(np.float32(_sum(row, weights)) + np.float32(one)))
            for weights, one in zip(first, bias, strict=True)
        ]
        numbers = [
            np.float32(_sum([float(one) for one in hidden], weights)) + np.float32(one)
            for weights, one in zip(second, last, strict=True)
        ]
        expected = np.array(numbers, np.float32).reshape(model.num_layers, 2, -1)
        if isinstance(rows, np.ndarray):  # keys come in the order of the file's rows
            expected[:, 0] = expected[:, 0, np.searchsorted(np.sort(rows), rows)]
        assert np.array_equal(learned.reshape(expected.shape), expected)


def _sum(row: list[float], weights: list[float]) -> float:
    """By Python's float64, in order."""
    total = 0.0
    for one, weight in zip(row, weights, strict=True):
        total += one * weight
    return total
