"""Versions of Python, packages and our own code, which are part of the keys of caches."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from functools import cache
from pathlib import Path

import lite_runner
from lite_runner.system import packages
from lite_runner.system.user_cache import remembered

PACKAGE = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    """Versions of what computes, without importing it; an absent package has no entry."""
    found = {"python": platform.python_version(), "lite_runner": lite_runner.__version__}
    installed: dict[str, str]
    installed = remembered(f"versions in {sys.prefix}", packages.state(), _installed)
    return found | installed


def _installed() -> dict[str, str]:
    every = {package: packages.installed(package) for package in ("numpy", "mindspore")}
    return {package: version for package, version in every.items() if version is not None}


@cache
def code_digest(package: Path = PACKAGE) -> str:
    """SHA-256 over paths and contents of all Python files below a folder, 64 hexadecimal digits.

    The whole package counts, not only what builds graphs: a list of modules would go stale. Cached
    for the life of the process, and in the user's cache while sizes and times of the files stay.
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
