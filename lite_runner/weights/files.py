"""Files on disk: read by mapping, written whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError, EnvironmentFault

MAPPED_AROUND = 2 << 20  # bytes beside a touched one that Linux maps with it, at most


def sha256_of(*paths: Path) -> str:
    """Hex digest of the contents of files, one behind the other, read in pieces."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


def map_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of `path` as a read-only memory map, uint8 [size].

    Raises ArtifactError where the file is empty or cannot be read.
    """
    try:
        size = path.stat().st_size
        if size == 0:
            raise ArtifactError(f"{path}: the file is empty", "fetch or write it again")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error


def drop_pages(array: NDArray[Any]) -> None:
    """Let the process forget the pages of a mapped file below `array`; touched again, they return.

    Nothing happens to an array in memory. Without it what was read once counts as held.
    """
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    base = whole.base.obj if isinstance(whole.base, memoryview) else whole.base
    if isinstance(base, mmap.mmap) and array.size:
        # The kernel maps pages around a touched one as well, 64 KiB or, from Linux 6.18 on, as
        # much as its cache keeps in one piece (a folio): they go with it.
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


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_space(folder: Path, needed: int) -> None:
    """Raise EnvironmentFault unless `folder`, which exists, has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentFault(
            f"{folder}: the disk is too small: {free / 2**20:,.0f} MiB free, "
            f"{needed / 2**20:,.0f} MiB needed",
            "free some space or choose another folder",
        )


def make_folder(folder: Path, hint: str = "choose a writable folder") -> None:
    """Create `folder` and its parents; EnvironmentFault with `hint` where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: cannot be created: {error.strerror or error}", hint
        ) from error


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `target`, file or folder, in one step.

    Killed at any point the old or the new one stands under the name, whole; what it leaves beside
    is called .NAME.*.tmp. Raises EnvironmentFault where the system refuses to write.
    """
    make_folder(target.parent)
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{target.name}.", suffix=".tmp", dir=target.parent
        ) as name:
            fresh = Path(name) / target.name
            fresh.mkdir()
            yield fresh
            sync_folder(fresh)
            put_in_place(fresh, target)
            sync_folder(target.parent)
    except OSError as error:
        raise EnvironmentFault(
            f"{target}: cannot be written: {error.strerror or error}",
            "check the permissions of the folder and the free space",
        ) from error


def put_in_place(fresh: Path, target: Path) -> None:
    """Give `fresh` the name `target`, on the same disk, in one step; what had it, file or folder,
    is then where `fresh` was, or beside that."""
    if not target.exists() or not _exchange(fresh, target):
        if target.exists():  # a file system that cannot exchange: two steps
            target.rename(fresh.with_name("old"))
        fresh.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where this system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    code = rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange)
    return bool(code == 0)


@contextlib.contextmanager
def atomic_write(path: Path, size: int = 0) -> Iterator[IO[bytes]]:
    """A file that appears under `path` only once it is complete and synced.

    `size` is the number of bytes to come, for which there must be space on the disk. Creates the
    folder. Raises EnvironmentFault where the system refuses to write.
    """
    make_folder(path.parent)
    require_space(path.parent, size)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be written: {error.strerror or error}",
            "check the permissions of the folder and the free space",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
