"""A tensor that is still on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# BF16 has no NumPy type: its raw arrays are uint16, the upper half of a float32.
DType = Literal["F32", "F16", "BF16"]


@dataclass(frozen=True)
class LazyTensor:
    """Shape and type now, values when asked. `read` gives the stored bits, C-contiguous."""

    shape: tuple[int, ...]
    dtype: DType
    read: Callable[[], NDArray[Any]]

    def float32(self) -> NDArray[np.float32]:
        """The values as float32; exact for all three types. May be a read-only view."""
        raw = self.read()
        if self.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)
