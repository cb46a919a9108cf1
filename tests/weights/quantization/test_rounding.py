"""Weights rounded to 16 bits, against NumPy's arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.config.schema import DType
from lite_runner.errors import ArtifactError
from lite_runner.weights.quantization.quantized import VALUES_AT_ONCE
from lite_runner.weights.quantization.rounding import with_matrices_in
from lite_runner.weights.tensor import LazyTensor, narrowed

Floats = NDArray[np.float32]


def lazy(values: Floats, *, slices: bool = False) -> LazyTensor:
    part = (lambda index: np.ascontiguousarray(values[index])) if slices else None
    return LazyTensor(values.shape, "F32", lambda: values, part)


def nearest(values: Floats, dtype: DType) -> Floats:
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    mantissas, exponents = np.frexp(values)
    return np.ldexp(np.rint(mantissas * 256) / 256, exponents)


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matrices_are_rounded_to_the_nearest(dtype: DType, slices: bool) -> None:
    rng = np.random.default_rng(0)
    # Of every size that float16 has, in more than is rounded at a time.
    values = rng.standard_normal((3, VALUES_AT_ONCE // 2)).astype(np.float32)
    values *= np.float32(2) ** rng.integers(-30, 13, values.shape)
    (found,) = with_matrices_in({"w": lazy(values, slices=slices)}, dtype).values()
    assert found.nbytes == values.nbytes // 2
    wanted = nearest(values, dtype)
    assert (wanted != values).any()
    np.testing.assert_array_equal(found.float32(), wanted)
    index = (slice(1, 3), slice(5, 9))
    np.testing.assert_array_equal(found.piece(index), found.read()[index])


def test_what_stays_as_it_is() -> None:
    values = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    tensors = {
        "bias": lazy(values[0]),
        "half": LazyTensor((3, 4), "F16", lambda: narrowed(values, "F16")),
        "brain": LazyTensor((3, 4), "BF16", lambda: narrowed(values, "BF16")),
    }
    for dtype in ("float16", "bfloat16"):
        assert with_matrices_in(tensors, dtype) == tensors
    matrices = {"w": lazy(values)}
    assert with_matrices_in(matrices, "float32") == matrices


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65520.0, -7e4])
def test_what_float16_cannot_hold_is_refused(value: float) -> None:
    values = np.zeros((4, 5), np.float32)
    values[2, 3] = value
    (found,) = with_matrices_in({"w": lazy(values)}, "float16").values()
    with pytest.raises(ArtifactError, match="w: a value that is no number, or too large for F16"):
        found.read()
    values[2, 3] = 65519.0
    assert found.read()[2, 3] == 65504


def test_what_bfloat16_cannot_hold_is_refused() -> None:
    values = np.full((2, 2), np.finfo(np.float32).max)
    (found,) = with_matrices_in({"w": lazy(values)}, "bfloat16").values()
    with pytest.raises(ArtifactError, match="too large for BF16"):
        found.read()
    values[:] = 3.389e38
    np.testing.assert_array_equal(found.float32(), nearest(values, "bfloat16"))
    values[1, 1] = np.nan
    with pytest.raises(ArtifactError, match="no number"):
        found.read()
