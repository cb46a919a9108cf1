"""Matrices of numbers as panels of 32 outputs, as the native kernels read them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.native import library
from lite_runner.native.layout import Block
from lite_runner.native.structs import PANEL, Order
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.quantization.quantized import QuantizedTensor


class Panels:
    """Arrays [out, n] of one shape as panels [out / 32, n, 32], interleaved if there are two;
    zero-padded."""

    def __init__(
        self,
        arrays: Sequence[NDArray[Any]],
        multiple: int = 1,
        *,
        bfloat16: bool = False,
        order: Order = Order.PLAIN,
    ) -> None:
        """n is padded to a `multiple`; float32 may be stored as bfloat16 if that is exact; `order`:
        order of the integers in a word."""
        self._arrays = [np.ascontiguousarray(array) for array in arrays]
        self._order = order
        rows, width = arrays[0].shape
        self._width = -(-width // multiple) * multiple
        self._size = 2 if bfloat16 else arrays[0].itemsize
        self._panel = PANEL * self._width * self._size
        self.nbytes = len(arrays) * -(-rows // PANEL) * self._panel

    def write(self, target: Block) -> None:
        found = library()
        for index, array in enumerate(self._arrays):
            rows, width = array.shape
            found.lite_runner_pack(
                ctypes.c_void_p(array.ctypes.data),
                *(ctypes.c_int64(number) for number in (rows, width, self._width)),
                *(ctypes.c_int64(number) for number in (array.itemsize, self._size, self._order)),
                ctypes.c_int64(len(self._arrays)),
                ctypes.c_void_p(target.ctypes.data + index * self._panel),
            )
            drop_pages(array)  # a mapped file's pages are not read again


class Dequantized:
    """Group-quantized matrices dequantized to float32 panels: see Panels."""

    def __init__(self, parts: Sequence[QuantizedTensor]) -> None:
        self._parts = parts
        rows, inputs = parts[0].shape
        self._panel = 4 * PANEL * (-(-inputs // 8) * 8)
        self.nbytes = len(parts) * -(-rows // PANEL) * self._panel

    def write(self, target: Block) -> None:
        found = library()
        for index, part in enumerate(self._parts):
            arrays = [np.ascontiguousarray(part.values), np.ascontiguousarray(part.scales)]
            if part.minimums is not None:
                arrays.append(np.ascontiguousarray(part.minimums))
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
            pointers += [ctypes.c_void_p(None)] * (3 - len(pointers))
            numbers = (*part.shape, part.bits, part.group, len(self._parts))
            found.lite_runner_widen(
                *pointers,
                *(ctypes.c_int64(number) for number in numbers),
                ctypes.c_void_p(target.ctypes.data + index * self._panel),
            )
