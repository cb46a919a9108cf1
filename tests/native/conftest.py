"""The operators, called as ctypes and MindSpore call them, with each set of instructions."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.native.layout import Layout

Floats = NDArray[np.float32]


class Operators:
    """A library of operators."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.set_threads = self._library.lite_runner_set_threads

    def choose(self, instructions: str) -> bool:
        """Whether this machine has the instructions, which are used from here on."""
        return bool(self._library.lite_runner_choose(instructions.encode()))

    def linear(self, block: NDArray[np.uint8], out: int, x: Floats) -> Floats:
        """x [rows, in] times a packed matrix [out, in]."""
        assert x.flags.c_contiguous and x.dtype == np.float32
        result = np.full((len(x), out), np.nan, np.float32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (block, x, result)]
        self._library.lite_runner_linear(
            *pointers[:2], ctypes.c_int64(len(x)), ctypes.c_void_p(result.ctypes.data)
        )
        return result

    def call(self, name: str, *inputs: NDArray[Any] | Layout, shape: tuple[int, int]) -> Floats:
        """What an AOT operator makes of its inputs: float32 of the `shape`."""
        result = np.full(shape, np.nan, np.float32)
        blocks = (one.block() if isinstance(one, Layout) else one for one in inputs)
        assert self.code(name, *blocks, result) == 0
        return result

    def code(self, name: str, *arrays: NDArray[Any]) -> int:
        """What an AOT operator returns, given its inputs and then its output."""
        assert all(array.flags.c_contiguous for array in arrays)
        count = len(arrays)
        shapes = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
        code: int = getattr(self._library, name)(
            count,
            (ctypes.c_void_p * count)(*(array.ctypes.data for array in arrays)),
            (ctypes.c_int * count)(*(array.ndim for array in arrays)),
            (ctypes.c_void_p * count)(*(ctypes.addressof(one) for one in shapes)),
            (ctypes.c_char_p * count)(*(array.dtype.name.encode() for array in arrays)),
            None,
            None,
        )
        return code


# The test of the sanitizers runs the others again with a library of its own, which is slow.
SANITIZED = os.environ.get("SANITIZED_OPERATORS")
if SANITIZED:
    settings.register_profile("sanitized", parent=settings(), max_examples=12)
    settings.load_profile("sanitized")
    native.LIBRARY = Path(SANITIZED)
OPERATORS = Operators(native.LIBRARY)
INSTRUCTIONS = [name for name in ("portable", "avx2", "avx512") if OPERATORS.choose(name)]


@pytest.fixture(scope="module", params=INSTRUCTIONS)
def operators(request: pytest.FixtureRequest) -> Operators:
    assert OPERATORS.choose(request.param)
    OPERATORS.set_threads(2)
    return OPERATORS
