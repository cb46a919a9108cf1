"""Digest of the package's code, part of the keys of caches across runs.

It covers the whole package, not only the modules that build graphs: such a list goes stale when a
module moves, and would serve wrong entries. After an update everything is rebuilt once.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from lite_runner.system.user_cache import remembered

PACKAGE = Path(__file__).resolve().parent.parent


@cache
def code_digest(package: Path = PACKAGE) -> str:
    """SHA-256 over paths and contents of all Python files below a folder, 64 hexadecimal digits.

    Cached for the life of the process, like its imported modules; and in the user's cache while
    sizes and times of the files stay, as Python does with its bytecode.
    """
    paths = sorted(
        Path(folder, name)
        for folder, _, names in os.walk(package)
        for name in names
        if name.endswith(".py") and not name.startswith(".")  # an editor's temporary file
    )
    found = ((path, path.stat()) for path in paths)
    state = "\n".join(f"{path} {one.st_size} {one.st_mtime_ns}" for path, one in found)
    digest: str = remembered(f"code of {package}", state, lambda: _digest(package, paths))
    return digest


def _digest(package: Path, paths: list[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()
