"""Matrices in GGUF's blocks, packed for the native kernels without becoming floats."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.native import library
from lite_runner.native.structs import PANEL, UNITS, Format
from lite_runner.weights.formats.gguf_blocks import BlockMatrix
from lite_runner.weights.memory_map import drop_pages


class BlockPanels:
    """Matrices in GGUF's blocks of one type and shape as panels of units, interleaved if there are
    two: see BlockForm in src/layers.h."""

    def __init__(self, parts: Sequence[BlockMatrix]) -> None:
        self._parts = parts
        self.format = Format[parts[0].type_name]
        (rows, inputs), (span, nbytes) = parts[0].shape, UNITS[self.format]
        self._panel = inputs // span * nbytes
        self.nbytes = len(parts) * -(-rows // PANEL) * self._panel

    def write(self, target: NDArray[np.uint8]) -> None:
        """Fill `target` [nbytes]."""
        found = library()
        for index, part in enumerate(self._parts):
            data = np.ascontiguousarray(part.data)
            found.lite_runner_pack_blocks(
                ctypes.c_void_p(data.ctypes.data),
                *(ctypes.c_int64(number) for number in (self.format, *part.shape)),
                ctypes.c_int64(len(self._parts)),
                ctypes.c_void_p(target.ctypes.data + index * self._panel),
            )
            drop_pages(data)
