"""Names and shapes of the tensors that a model needs: checked, or drawn from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter as Parameter  # re-exported for users' code
from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyTensor


def expected_tensors(config: Decoder) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the model needs."""
    return {parameter.name: parameter.shape for parameter in parameters(config)}


def check_tensors(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise one ArtifactError with all missing, unexpected and wrongly shaped tensors."""
    missing = [f"{name} {_text(expected[name])}" for name in expected if name not in found]
    unexpected = [f"{name} {_text(found[name])}" for name in found if name not in expected]
    misshapen = [
        f"{name}: got {_text(found[name])}, expected {_text(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    errors = [
        f"{len(names)} {kind}: " + "; ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of the wrong shape", misshapen),
        )
        if names
    ]
    remedy = "check that model= and load_checkpoint= belong together, or use model=auto"
    biases = (name for name in found if name not in expected)
    if not missing and unexpected and all(name.endswith("norm.bias") for name in biases):
        errors.append("msmodelslim's anti-outlier gives norms a bias, which is not read yet")
        remedy = "a checkpoint that was quantized without anti-outlier"
    if errors:
        raise ArtifactError(
            f"{where}: the tensors are not those of the model ({len(expected)} expected, "
            f"{len(found)} found)\n  - " + "\n  - ".join(errors),
            remedy,
        )


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


SCALE = np.float32(0.02)  # standard deviation, as the families initialize their weights


def random_checkpoint(
    config: Decoder, seed: int, dtype: Literal["F32", "F16"] = "F32"
) -> dict[str, LazyTensor]:
    """Every tensor of the model, drawn when read: normal, the gains of norms around 1.

    A tensor depends on `seed` and its own name only. `dtype` F16: for its size alone.
    """
    return {
        name: LazyTensor(shape, dtype, partial(_draw, seed, name, shape))
        for name, shape in expected_tensors(config).items()
    }


def _draw(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= SCALE
    if name.endswith(".gamma") or (len(shape) == 1 and name.endswith(".weight")):  # norm gains
        values += np.float32(1)
    return values
