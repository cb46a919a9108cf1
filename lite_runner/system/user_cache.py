"""The cache folder of a user: values that take longer to make than to read, and large entries.

Large entries are packed layers, prefixes, compiled graphs and exports: in use, or removed beyond a
limit. Each is a folder. Its time is that of its last use, and each process that uses it holds a
shared lock on it until the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.system.files import (
    atomic_write,
    cache_dir,
    folder_size,
    make_folder,
    read_json_object,
    readable,
    remove_orphans,
    require_space,
    sha256_of,
    temporary_beside,
)

CACHE_HINT = "free some space, or set LITE_RUNNER_CACHE to another, writable folder"
VALUES = "values"  # folder below cache_dir()
LARGE = 16 << 20  # bytes; the digest of a smaller file is computed faster than looked up
_SHA256 = hashlib.sha256().digest_size * 2  # letters of it as hex
SHOWN = 5  # entries that a note names
_SETTLED_NS = 100_000_000  # the times of a younger file may not tell a further write

_found: dict[str, tuple[str, Any]] = {}  # by this process in large files: state, value


def cannot_hold(folder: Path, size: int) -> str:
    """The reason that a folder of the cache cannot hold `size` more bytes; empty if it can."""
    try:
        make_folder(folder)
        require_space(folder, size)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except EnvironmentFault as error:
        return error.message
    except OSError as error:
        return f"{folder}: cannot be written: {error.strerror or error}"


def remembered(name: str, state: str, make: Callable[[], Any]) -> Any:
    """The result of `make`, of JSON's types; cached where it was made of this `state`.

    There is one value of a name, the newest, with a checksum: one that is damaged is made again, as
    it is each time where there is no cache yet, or it cannot be written.
    """
    cache = cache_dir()
    if not os.access(cache, os.R_OK | os.X_OK):
        return make()
    path = cache / VALUES / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(ArtifactError):  # not there, or broken
        found = read_json_object(path)
        kept = [name, state, found.get("value")]
        if found.get("sha256") == _checksum(kept):
            return kept[-1]
    value = make()
    text = json.dumps({"value": value, "sha256": _checksum([name, state, value])})
    with contextlib.suppress(EnvironmentFault), atomic_write(path) as file:
        file.write(text.encode())
    return value


def digest_of(path: Path) -> str:
    """SHA-256 of a file, as hex. A large file is read once for each state of it."""
    return str(of_file("sha256", path, lambda: sha256_of(path)))


def state_of(found: os.stat_result) -> str:
    """The state of a file: its inode, its size and the times of its last changes."""
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def of_file(name: str, path: Path, make: Callable[[], Any]) -> Any:
    """The result of `make` for a file; a large file's is `remembered` for each state of it, and in
    this process in any case."""
    found = path.stat()
    if found.st_size < LARGE or time.time_ns() - found.st_ctime_ns < _SETTLED_NS:
        return make()
    state = state_of(found)
    key = f"{name} of {path.resolve()}"
    if key not in _found or _found[key][0] != state:
        _found[key] = state, remembered(key, state, make)
    return _found[key][1]


def known_of_file(name: str, path: Path, value: Any) -> None:
    """Remember what `of_file` would make of a file that this process has just written, once its
    times can tell a further write."""
    if (found := path.stat()).st_size >= LARGE:
        age = time.time_ns() - found.st_ctime_ns
        if age < 0:  # the file server's clock is ahead
            return
        time.sleep(max(0, _SETTLED_NS - age + 1_000_000) / 1e9)
        of_file(name, path, lambda: value)


def _checksum(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


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
    """Default limit of the entries in bytes: a quarter of the free disk without them."""
    used = sum(map(folder_size, limited_folders()))
    with contextlib.suppress(OSError):
        return (shutil.disk_usage(cache_dir()).free + used) // 4
    return used


def trim(limit: int | None, since: float) -> dict[str, int]:
    """Remove entries, the least recently used first, until `limit` bytes or less are left; None:
    the `default_limit`.

    Neither an entry that a process uses is removed, nor one used after `since`, as time.time().
    Returns the names of those removed, and their bytes.
    """
    if limit is None:
        limit = default_limit()
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


def listed(removed: Mapping[str, int]) -> str:
    """The entries that `trim` removed, as text."""
    names = [f"{name} ({readable(size)})" for name, size in removed.items()]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _remove(entry: Path) -> bool:
    """True if an unused entry was removed."""
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


def is_intact(path: Path, digest: str) -> bool:
    """True if a file can be read and has this digest, a SHA-256 or that of a blob of git."""
    try:
        found = digest_of(path) if len(digest) == _SHA256 else digest_like(path, digest)
        return found == digest
    except OSError:
        return False


def digest_like(path: Path, like: str) -> str:
    """The digest of a file, of the kind of `like`."""
    if not like:
        return ""
    if len(like) == _SHA256:
        return sha256_of(path)
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size)  # as git names a blob
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
