"""A checkpoint as if it had been saved in another type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.config import schema
from lite_runner.errors import ArtifactError
from lite_runner.weights.formats.safetensors_file import NUMPY_TYPES
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.quantization.quantized import VALUES_AT_ONCE
from lite_runner.weights.tensor import DType, LazyTensor, narrowed

PIECE_BYTES = 1 << 24  # that are read at a time, where slices of a tensor are cheap
_SHORT: dict[schema.DType, DType] = {"float16": "F16", "bfloat16": "BF16"}
# From here on the nearest number of the type is infinite.
_LIMITS = {"F16": np.float32(65520), "BF16": np.float32(2.0**128 * (1 - 2.0**-9))}


def with_matrices_in(
    tensors: Mapping[str, LazyTensor], dtype: schema.DType
) -> dict[str, LazyTensor]:
    """The tensors, matrices that are wider than `dtype` rounded to it when they are read.

    Those that are saved in 16 bits already, of either type, are as they are; so are norms and
    biases. Reading raises ArtifactError for a value that the type cannot hold.
    """
    short = _SHORT.get(dtype)
    if short is None:
        return dict(tensors)
    return {
        name: _rounded(name, tensor, short)
        if tensor.dtype == "F32" and len(tensor.shape) > 1
        else tensor
        for name, tensor in tensors.items()
    }


def describe(dtype: schema.DType, *, quantized: bool) -> str:
    """A line about compute_dtype= where a run does not compute with matrices of that type."""
    if quantized:
        return f"compute_dtype={dtype}: quantized weights stay as they are, all else is float32"
    return (
        f"compute_dtype={dtype}: MindSpore's operators compute in float32 on a CPU, with weights "
        f"rounded to {dtype}"
    )


def _rounded(name: str, tensor: LazyTensor, dtype: DType) -> LazyTensor:
    part = tensor.part
    return LazyTensor(
        tensor.shape,
        dtype,
        lambda: _nearest(name, dtype, tensor.shape, tensor.chunks(PIECE_BYTES)),
        None if part is None else lambda index: _piece(name, dtype, part(index)),
    )


def _piece(name: str, dtype: DType, values: NDArray[np.float32]) -> NDArray[Any]:
    return _nearest(name, dtype, values.shape, [values])


def _nearest(
    name: str, dtype: DType, shape: tuple[int, ...], pieces: Iterable[NDArray[np.float32]]
) -> NDArray[Any]:
    """The stored bits [*shape] of the values that come in `pieces`."""
    result = np.empty(math.prod(shape), NUMPY_TYPES[dtype])
    limit, done = _LIMITS[dtype], 0
    for piece in pieces:
        flat = piece.reshape(-1)
        for start in range(0, flat.size, VALUES_AT_ONCE):
            values = flat[start : start + VALUES_AT_ONCE]
            if not (values.max() < limit and values.min() > -limit):  # NaN fails too
                raise ArtifactError(
                    f"{name}: a value that is no number, or too large for {dtype}",
                    "model.model_config.compute_dtype=float32, or another checkpoint",
                )
            result[done : done + values.size] = narrowed(values, dtype)
            done += values.size
        drop_pages(piece)
    return result.reshape(shape)
