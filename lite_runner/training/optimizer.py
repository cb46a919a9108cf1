"""AdamW, clipping and learning rates, as PyTorch and transformers compute them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from lite_runner.training.kernels import Array
from lite_runner.training.options import Schedule

BETAS = (0.9, 0.999)
EPS = 1e-8


def rate(schedule: Schedule, base: float, step: int, steps: int, warmup: int) -> float:
    """The learning rate of a step, the first being 0."""
    if step < warmup:
        return base * step / warmup
    if schedule == "constant":
        return base
    share = (step - warmup) / max(1, steps - warmup)
    if schedule == "linear":
        return base * max(0.0, 1 - share)
    return base * max(0.0, 0.5 * (1 + math.cos(math.pi * share)))


def squares(arrays: Iterable[Array]) -> float:
    """The sum of squares of all values."""
    return sum(float(np.vdot(one, one)) for one in arrays)


def clipped(gradients: Mapping[str, Array], most: float, total: float | None = None) -> float:
    """The norm of all gradients together, which are scaled in place if it is above `most`; 0: they
    are not. `total`: their squares, with those of other ranks."""
    norm = math.sqrt(squares(gradients.values()) if total is None else total)
    if most and (factor := most / (norm + 1e-6)) < 1:
        for one in gradients.values():
            one *= np.float32(factor)
    return norm


class AdamW:
    """The optimizer, and its state."""

    def __init__(self, trained: Mapping[str, Array], weight_decay: float) -> None:
        """The arrays of `trained` are updated in place."""
        self.trained, self.weight_decay = trained, weight_decay
        self.steps = 0
        self.first = {name: np.zeros_like(array) for name, array in trained.items()}
        self.second = {name: np.zeros_like(array) for name, array in trained.items()}

    def step(self, gradients: Mapping[str, Array], learning_rate: float) -> None:
        """Update the trained arrays."""
        self.steps += 1
        small, large = BETAS
        size = learning_rate / (1 - small**self.steps)
        root = math.sqrt(1 - large**self.steps)
        for name, array in self.trained.items():
            grad = gradients.get(name, np.float32(0))  # 0 for an expert without tokens
            first, second = self.first[name], self.second[name]
            if array.ndim > 1:  # no decay of norms and biases, as in transformers and MindFormers
                array *= np.float32(1 - learning_rate * self.weight_decay)
            first += (grad - first) * np.float32(1 - small)
            second *= np.float32(large)
            second += np.float32(1 - large) * grad * grad
            divisor = np.sqrt(second)
            divisor /= np.float32(root)
            divisor += np.float32(EPS)
            array -= np.float32(size) * (first / divisor)
