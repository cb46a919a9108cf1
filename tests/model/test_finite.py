from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lite_runner.config.schema import RunConfig
from lite_runner.errors import NonFiniteError, RunnerError
from lite_runner.model.files import ModelFiles
from lite_runner.model.finite import explained_nonfinite
from lite_runner.model.locate import locate
from tests.paths import REFERENCE

WEIGHT = "model.layers.1.attention.wo.weight"


@pytest.fixture
def files(configure: Callable[..., RunConfig]) -> ModelFiles:
    return locate(configure("model=auto", f"load_checkpoint={REFERENCE / 'llama'}"))


def explained(files: ModelFiles) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught, explained_nonfinite(files):
        raise NonFiniteError("the logits hold NaN", "try float32")
    return caught.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_weight_is_named(files: ModelFiles, value: float, dtype: str) -> None:
    tensors = dict(files.tensors())
    values = tensors[WEIGHT].float32().copy()
    values[-1, -1] = value
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    stored = {"F32": values, "F16": values.astype(np.float16), "BF16": bits}[dtype]
    tensors[WEIGHT] = replace(
        tensors[WEIGHT], dtype=dtype, read=lambda: stored, part=lambda index: stored[index]
    )
    error = explained(replace(files, held=tensors, rounded="float32"))
    assert error.message == f"the logits hold NaN: {WEIGHT} of the checkpoint is not finite"


def test_of_finite_weights_it_is_the_computation(files: ModelFiles) -> None:
    error = explained(files)
    assert "all weights are finite" in error.message and error.hint == "try float32"


def test_without_the_files_the_error_is_as_it_was(files: ModelFiles) -> None:
    assert files.path is not None
    assert explained(replace(files, path=files.path / "gone")).message == "the logits hold NaN"


def test_other_errors_pass(files: ModelFiles) -> None:
    with pytest.raises(RunnerError, match="else"), explained_nonfinite(files):
        raise RunnerError("else")
