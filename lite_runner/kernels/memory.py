"""Memory for what the operators read."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes: a line of the processor's cache
HUGE_PAGE = 2 << 20  # bytes
CHUNK = 32 * HUGE_PAGE  # asked of the system at a time; what is never written stays its own

Block: TypeAlias = NDArray[np.uint8]


def aligned(nbytes: int) -> Block:
    """Zeros that begin where the operators read fastest."""
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


class HugePages:
    """Zeros for the blocks of a model, one after the other, in huge pages where there are any.

    A processor keeps the addresses of only some pages at hand, and a step reads all weights: in
    small pages that lie scattered it takes up to a fifth longer.
    """

    def __init__(self) -> None:
        self._free = np.zeros(0, np.uint8)

    def room(self, nbytes: int) -> Block:
        """The next `nbytes`; they begin where the operators read fastest."""
        taken = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if taken > len(self._free):
            self._free = _chunk(max(CHUNK, taken))
        block, self._free = self._free[:nbytes], self._free[taken:]
        return block


def _chunk(nbytes: int) -> Block:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=private)
    with suppress(AttributeError, OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    return whole[-whole.ctypes.data % HUGE_PAGE :]
