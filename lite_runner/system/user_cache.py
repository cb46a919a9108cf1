"""The cache folder of a user, and small values in it that take longer to make than to read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.system.files import atomic_write, cache_dir, make_folder, require_space, sha256_of
from lite_runner.system.json_file import read_json_object

CACHE_HINT = "free some space, or set LITE_RUNNER_CACHE to another, writable folder"
VALUES = "values"  # folder below cache_dir()
LARGE = 16 << 20  # bytes; the digest of a smaller file is computed faster than looked up
_SETTLED_NS = 100_000_000  # the times of a younger file may not tell a further write

_found: dict[str, tuple[str, Any]] = {}  # by this process in large files: state, value


def cannot_hold(folder: Path, size: int) -> str:
    """Why an entry of `size` bytes cannot be made in a folder of the cache; empty if it can."""
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


def _checksum(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
