"""Learning rates, clipping and AdamW."""

from __future__ import annotations

import numpy as np
import pytest

from lite_runner.training.optimizer import AdamW, clipped, rate
from lite_runner.training.options import Schedule


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.0, 0.5, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rates_are_those_of_transformers(
    schedule: Schedule, expected: list[float]
) -> None:
    found = [rate(schedule, 1.0, step, 6, 2) for step in range(6)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_gradients_are_clipped_together() -> None:
    gradients = {"a": np.array([3.0], np.float32), "b": np.array([4.0], np.float32)}
    assert clipped(gradients, 0.0) == clipped(gradients, 10.0) == 5.0
    assert gradients["a"][0] == 3.0
    assert clipped(gradients, 1.0) == 5.0
    assert [one[0] for one in gradients.values()] == pytest.approx([0.6, 0.8], rel=1e-6)


def test_adamw_equals_pytorch() -> None:
    """Two steps of torch.optim.AdamW([[1, -2]], lr=0.1, weight_decay=0.5), and of a vector, as of
    norms and biases, which does not decay."""
    weights = {"w": np.array([[1.0, -2.0]], np.float32), "b": np.array([1.0, -2.0], np.float32)}
    optimizer = AdamW(weights, 0.5)

    def step(*gradient: float) -> None:
        array = np.array(gradient, np.float32)
        optimizer.step({"w": array[None], "b": array}, 0.1)

    step(0.5, -1.0)
    assert weights["w"][0] == pytest.approx([0.85, -1.8], abs=1e-6)
    assert weights["b"] == pytest.approx([0.9, -1.9], abs=1e-6)
    step(-0.25, 3.0)
    first = np.array([0.9 * 0.05 - 0.025, -0.09 + 0.3]) / (1 - 0.81)
    second = np.array([0.999 * 0.00025 + 0.0000625, 0.999 * 0.001 + 0.009]) / (1 - 0.999**2)
    change = 0.1 * first / (np.sqrt(second) + 1e-8)
    assert weights["w"][0] == pytest.approx(np.array([0.85, -1.8]) * 0.95 - change, abs=1e-5)
    assert weights["b"] == pytest.approx(np.array([0.9, -1.9]) - change, abs=1e-5)
