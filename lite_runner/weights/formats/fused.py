"""Tensors that checkpoints fuse or reorder, to and from the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, stored_rows
from lite_runner.architectures.fused import Rows
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.derive import derived
from lite_runner.weights.tensor import LazyTensor


def split(tensor: LazyTensor, parameter: Parameter, model: Decoder) -> LazyTensor:
    """The rows of a parameter in the stored tensor [rows, ...]: a matrix [out, in], a bias, or B of
    an adapter."""
    rows = stored_rows(parameter, model)
    if rows is None:
        return tensor
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    return derived(tensor, (count, *tensor.shape[1:]), lambda array: array[rows])


def fuse(parts: Sequence[Parameter], held: Sequence[LazyTensor], model: Decoder) -> LazyTensor:
    """The stored tensor from those of its parameters: the inverse of `split`."""
    rows = [stored_rows(part, model) for part in parts]
    if rows[0] is None:
        return held[0]
    dtypes = {tensor.dtype for tensor in held}
    if len(dtypes) > 1:
        raise ArtifactError(
            f"{', '.join(part.name for part in parts)}: got the types {', '.join(sorted(dtypes))}, "
            "expected one: the format keeps them in one tensor",
            "convert the checkpoint to one type first",
        )
    shape = (sum(tensor.shape[0] for tensor in held), *held[0].shape[1:])
    return LazyTensor(shape, held[0].dtype, lambda: _fused([one.read() for one in held], rows))


def _fused(parts: Sequence[NDArray[Any]], rows: Sequence[Rows | None]) -> NDArray[Any]:
    fused = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for part, where in zip(parts, rows, strict=True):
        fused[slice(None) if where is None else where] = part
    return fused
