"""Tensors computed from other tensors, still lazily."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.tensor import DType, LazyTensor, narrowed

COMPARED_AT_ONCE = 1 << 22  # values; keeps the comparison of large tensors in little memory


def derived(
    tensor: LazyTensor, shape: tuple[int, ...], change: Callable[[NDArray[Any]], NDArray[Any]]
) -> LazyTensor:
    """`change` applied to what `tensor` holds; it moves values and never computes new ones."""
    return LazyTensor(shape, tensor.dtype, lambda: _copied(tensor.read(), change).reshape(shape))


def cast(name: str, tensor: LazyTensor, dtype: DType) -> LazyTensor:
    """The tensor `name` in another type, each value rounded to the nearest.

    Reading raises ArtifactError where a value is too large for it.
    """
    if tensor.dtype == dtype:
        return tensor

    def read() -> NDArray[Any]:
        with np.errstate(over="ignore"):
            rounded = narrowed(tensor.float32(), dtype)
        if dtype == "F16" and np.isinf(rounded).any():
            raise ArtifactError(f"tensor {name}: has values too large for F16", "take BF16")
        return rounded

    return LazyTensor(tensor.shape, dtype, read)


def shifted(tensor: LazyTensor, by: float) -> LazyTensor:
    """Every value plus `by`, as F32: a sum has more bits than its parts."""
    return LazyTensor(tensor.shape, "F32", lambda: tensor.float32() + np.float32(by))


def transposed(tensor: LazyTensor) -> LazyTensor:
    """[a, b] as [b, a]."""
    return replace(
        derived(tensor, tensor.shape[::-1], lambda array: array.T),
        part=lambda index: _copied(tensor.piece(index[::-1]), lambda array: array.T),
    )


def _copied(stored: NDArray[Any], change: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
    """`change` of what was read, C-contiguous; a file's pages that were copied are let go."""
    result = np.ascontiguousarray(change(stored))
    if not np.may_share_memory(result, stored):
        drop_pages(stored)
    return result


def same_values(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether both hold the same bits (the same values, where the types differ)."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        left, right = one.read(), other.read()
        if left.dtype != np.uint16:
            bits = f"u{left.dtype.itemsize}"
            left, right = left.view(bits), right.view(bits)
    else:
        left, right = one.float32(), other.float32()
    left, right = left.reshape(-1), right.reshape(-1)
    return all(
        np.array_equal(left[i : i + COMPARED_AT_ONCE], right[i : i + COMPARED_AT_ONCE])
        for i in range(0, left.size, COMPARED_AT_ONCE)
    )
