"""MindSpore's tensors, for callers that ask for them."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor
from numpy.typing import NDArray


def tensor(array: NDArray[Any]) -> Tensor:
    """An array as a tensor of its own type."""
    return Tensor(array)
