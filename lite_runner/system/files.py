"""Atomic writes of files and folders, checksums, free disk space."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lite_runner.errors import EnvironmentFault


def sha256_of(*paths: Path) -> str:
    """SHA-256 of the concatenated contents of files, as hex."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """fsync `folder`, so that a rename in it survives a crash; does nothing where unsupported."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_space(folder: Path, needed: int) -> None:
    """Raise EnvironmentFault unless the existing `folder` has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentFault(
            f"{folder}: the disk is too small: {free / 2**20:,.0f} MiB free, "
            f"{needed / 2**20:,.0f} MiB needed",
            "free some space or choose another folder",
        )


def make_folder(folder: Path, hint: str = "choose a writable folder") -> None:
    """Create `folder` and its parents. Raises EnvironmentFault with `hint`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: cannot be created: {error.strerror or error}", hint
        ) from error


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder to fill; on exit it atomically replaces `target`, a file or a folder.

    A process killed midway leaves either the old or the new one intact, and at most a temporary
    .NAME.*.tmp beside it. Raises EnvironmentFault if it cannot be written.
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
    """Atomically rename `fresh` to `target`, on the same disk; a file or folder that was there is
    moved to where `fresh` was, or beside it."""
    if not target.exists() or not _exchange(fresh, target):
        if target.exists():  # the file system cannot exchange: two renames
            target.rename(fresh.with_name("old"))
        fresh.rename(target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; False if the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    code = rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange)
    return bool(code == 0)


@contextlib.contextmanager
def atomic_write(path: Path, size: int = 0) -> Iterator[IO[bytes]]:
    """A temporary file that is renamed to `path` once it is complete and synced.

    `size`: bytes that will be written, checked against the free space first. Creates the folder.
    Raises EnvironmentFault if it cannot be written.
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
