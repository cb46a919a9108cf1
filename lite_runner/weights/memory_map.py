"""Memory-mapped reads; pages that are no longer needed can be dropped."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError

MAPPED_AROUND = 2 << 20  # bytes beside a touched page that Linux maps with it, at most


def map_file(path: Path, *, private: bool = False) -> NDArray[np.uint8]:
    """The bytes of `path` as a memory map, uint8 [size]: read-only, or `private`, which may be
    written to without changing the file.

    Raises ArtifactError if the file is empty or cannot be read.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise ArtifactError(f"{path}: the file is empty", "fetch or write it again")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="c" if private else "r"))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error


def drop_pages(array: NDArray[Any]) -> None:
    """Drop the pages of the mapped file that `array` is a view of from the process's memory.

    They are read again when touched. Without it, all that was read once counts as resident memory.
    Does nothing for an array that is not a view of a mapped file.
    """
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    base = whole.base.obj if isinstance(whole.base, memoryview) else whole.base
    if isinstance(base, mmap.mmap) and array.size:
        # The kernel also maps pages around a touched one (64 KiB; a whole folio of the page cache
        # from Linux 6.18 on): drop these too.
        first, end = (bound - whole.ctypes.data for bound in np.byte_bounds(array))
        start = max(0, first - MAPPED_AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(whole.nbytes, end + MAPPED_AROUND)
        base.madvise(mmap.MADV_DONTNEED, start, end - start)


def first_bytes(path: Path, count: int) -> bytes:
    """At most `count` bytes from the start of `path`."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
