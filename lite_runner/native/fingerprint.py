"""Which C++ sources lie in src/: setup.py compiles the answer into the library, and so the package
knows its own from one of before.

setup.py runs this file by its path: it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

COMPILED = (".cc", ".h", ".inl")  # an editor's copies are not


@cache
def sources() -> str:
    """SHA-256 of the names and contents of the sources, 64 hexadecimal digits.

    The first answer stays, as the modules that were imported with it do: to a process that outlives
    an update, the new library is a foreign one.
    """
    whole = hashlib.sha256()
    for path in sorted((Path(__file__).resolve().parent / "src").iterdir()):
        if path.suffix in COMPILED:
            for part in (path.name.encode(), path.read_bytes()):
                whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()
