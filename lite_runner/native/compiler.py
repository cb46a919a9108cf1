"""Which C++ compiler builds the operators.

setup.py runs this file by its path: it imports nothing of the package.
"""

from __future__ import annotations

import os
import shlex
import shutil


def compiler() -> list[str]:
    """The command of $CXX, or of the first C++ compiler on PATH; OSError where there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise OSError("no C++ compiler")
