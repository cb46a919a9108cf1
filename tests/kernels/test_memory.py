"""Where the operators' memory lies, and that the system is asked for huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from lite_runner.kernels.memory import ALIGNMENT, CHUNK, HUGE_PAGE, HugePages, aligned
from lite_runner.weights.files import drop_pages


def test_blocks_are_zeros_that_share_nothing() -> None:
    memory = HugePages()
    sizes = [1, ALIGNMENT + 1, 3 << 20, CHUNK - (1 << 20), 2 * CHUNK + 7, 5]
    blocks = [memory.room(size) for size in sizes]
    for number, block in enumerate(blocks, start=1):
        assert block.ctypes.data % ALIGNMENT == 0
        assert not block.any()
        block[:] = number
    assert [len(block) for block in blocks] == sizes
    assert all((block == number).all() for number, block in enumerate(blocks, start=1))


def test_a_block_outlives_what_gave_it() -> None:
    block = HugePages().room(100)
    block[:] = 7
    drop_pages(block)  # as what was read of a file is forgotten; this is no file
    assert block.tobytes() == bytes([7] * 100)


def test_the_system_is_asked_for_huge_pages() -> None:
    block = HugePages().room(2 * HUGE_PAGE)
    assert block.ctypes.data % HUGE_PAGE == 0
    has_them = Path("/sys/kernel/mm/transparent_hugepage").is_dir()
    assert ("hg" in flags_of(block.ctypes.data)) == has_them
    assert "hg" not in flags_of(aligned(HUGE_PAGE).ctypes.data)


def flags_of(address: int) -> list[str]:
    """VmFlags of the mapping that an address lies in; hg is the advice to use huge pages."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        first, last = (int(end, 16) for end in mapping.split()[0].split("-"))
        if first <= address < last:
            return mapping.rpartition("VmFlags:")[2].split()
    raise AssertionError(np.uint64(address))
