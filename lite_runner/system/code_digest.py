"""Digest of the package's code, part of the keys of caches across runs.

It covers the whole package, not only the modules that build graphs: such a list goes stale when a
module moves, and would serve wrong entries. After an update everything is rebuilt once.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


@cache
def code_digest(package: Path = PACKAGE) -> str:
    """SHA-256 over paths and contents of all Python files below a folder, 64 hexadecimal digits.

    Cached for the life of the process, like its imported modules. Takes some 15 ms.
    """
    whole = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if path.name.startswith("."):  # an editor's temporary file
            continue
        for part in (path.relative_to(package).as_posix().encode(), path.read_bytes()):
            whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()
