"""Versions of what computes."""

from __future__ import annotations

import platform

import lite_runner
from lite_runner.system import packages


def versions() -> dict[str, str]:
    """Versions of what computes, without importing it; an absent package has no entry."""
    found = {"python": platform.python_version(), "lite_runner": lite_runner.__version__}
    for package in ("numpy", "mindspore"):
        if version := packages.installed(package):
            found[package] = version
    return found
