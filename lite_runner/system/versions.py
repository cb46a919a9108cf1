"""Versions of what computes."""

from __future__ import annotations

import platform
import sys

import lite_runner
from lite_runner.system import packages
from lite_runner.system.user_cache import remembered


def versions() -> dict[str, str]:
    """Versions of what computes, without importing it; an absent package has no entry."""
    found = {"python": platform.python_version(), "lite_runner": lite_runner.__version__}
    installed: dict[str, str]
    installed = remembered(f"versions in {sys.prefix}", packages.state(), _installed)
    return found | installed


def _installed() -> dict[str, str]:
    every = {package: packages.installed(package) for package in ("numpy", "mindspore")}
    return {package: version for package, version in every.items() if version is not None}
