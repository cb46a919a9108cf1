"""Versions of what computes."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib import metadata

import lite_runner


def versions() -> dict[str, str]:
    """Versions of what computes, without importing it; an absent package has no entry."""
    found = {"python": platform.python_version(), "lite_runner": lite_runner.__version__}
    for package in ("numpy", "mindspore"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
