"""Packed layers, prefixes, compiled graphs and exports in the cache: in use, or removed beyond a
limit.

An entry is a folder. Its time is that of its last use, and each process that uses it holds a shared
lock on it until the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from lite_runner.system.files import cache_dir, folder_size, remove_orphans, temporary_beside

# Folders below cache_dir(): compiled graphs, exports, packed layers, prefixes of prompts by model.
GRAPHS, EXPORTS, PACKED, PREFIXES = "graphs", "artifacts", "packed", "prefixes"

_in_use: dict[Path, int] = {}  # entry -> its descriptor, which holds the lock


def use(entry: Path) -> bool:
    """Keep an entry until this process ends, and note that it is used now; whether it is there."""
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # no such locks, as on some NFS: nothing is removed there
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    with contextlib.suppress(OSError):  # of another user
        os.utime(entry)
    if (before := _in_use.pop(entry, None)) is not None:
        os.close(before)
    _in_use[entry] = descriptor
    return entry.is_dir()  # it may have been removed while this process waited for the lock


def limited_folders() -> list[Path]:
    """The folders whose entries `trim` removes."""
    return [cache_dir() / name for name in (GRAPHS, EXPORTS, PACKED, PREFIXES)]


def default_limit() -> int:
    """Bytes that the entries may take where nobody says: a quarter of what the disk has free
    without them."""
    used = sum(map(folder_size, limited_folders()))
    with contextlib.suppress(OSError):
        return (shutil.disk_usage(cache_dir()).free + used) // 4
    return used


def trim(limit: int, since: float) -> dict[str, int]:
    """Remove entries, the least recently used first, until `limit` bytes or less are left.

    Neither an entry that a process uses is removed, nor one used after `since`, as time.time().
    Returns the names of those removed, and their bytes.
    """
    found: list[tuple[float, int, Path]] = []
    for parent in limited_folders():
        remove_orphans(parent)
        with contextlib.suppress(OSError):
            for entry in parent.iterdir():
                if not entry.name.startswith(".") and entry.is_dir() and not entry.is_symlink():
                    found.append((entry.stat().st_mtime, folder_size(entry), entry))
    left, removed = sum(size for _, size, _ in found), {}
    for used, size, entry in sorted(found):
        if left <= limit or used >= since:
            break
        if _remove(entry):
            left -= size
            removed[f"{entry.parent.name}/{entry.name}"] = size
    return removed


def _remove(entry: Path) -> bool:
    """True if an entry that nobody uses could be removed."""
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under a name of what is temporary, so that no half of it is ever used.
        hidden = temporary_beside(entry)
        entry.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    except OSError:  # in use, or of another user
        return False
    finally:
        os.close(descriptor)
    return True
