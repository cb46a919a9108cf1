"""Weights drawn from a seed, for tests and for trying a model without its checkpoint."""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.tensor import LazyTensor

SCALE = np.float32(0.02)  # standard deviation, as the families initialise their weights


def random_checkpoint(config: Decoder, seed: int) -> dict[str, LazyTensor]:
    """Every tensor of the model as F32, drawn when read: normal, the gains of norms around 1.

    A tensor depends on `seed` and its own name only.
    """
    return {
        name: LazyTensor(shape, "F32", partial(_draw, seed, name, shape))
        for name, shape in expected_tensors(config).items()
    }


def _draw(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= SCALE
    if name.endswith(".gamma") or (len(shape) == 1 and name.endswith(".weight")):  # gains of norms
        values += np.float32(1)
    return values
