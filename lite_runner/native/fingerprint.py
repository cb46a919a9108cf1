"""The C++ compiler, and the fingerprint of the sources in src/, which setup.py compiles into the
library, so that the package recognizes a stale build.

setup.py runs this file by path: it must not import the package.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from functools import cache
from pathlib import Path

COMPILED = (".cc", ".h", ".inl")  # not editors' backup files


def compiler() -> list[str]:
    """The command of $CXX, or of the first C++ compiler on PATH; OSError where there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise OSError("no C++ compiler")


@cache
def sources() -> str:
    """SHA-256 over names and contents of the sources, 64 hexadecimal digits.

    Cached for the life of the process, like its imported modules: a process that outlives an update
    must not load the new library.
    """
    whole = hashlib.sha256()
    for path in sorted((Path(__file__).resolve().parent / "src").iterdir()):
        if path.suffix in COMPILED:
            for part in (path.name.encode(), path.read_bytes()):
                whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()
