"""The interpreter and the installed packages against what lite-runner requires."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from functools import partial

from lite_runner.doctor.check import Check, Finding
from lite_runner.system import packages
from lite_runner.system.packages import Requirement


def checks() -> Iterator[Check]:
    """One of the interpreter, and one of each package."""
    yield Check("python", python)
    for one in packages.required():
        yield Check(one.name, partial(package, one))
    if not packages.required():
        yield Check("packages", unknown)


def python() -> Finding:
    """The interpreter that runs this."""
    version, wanted = platform.python_version(), packages.required_python()
    found = f"{version} ({sys.executable})"
    if wanted.allows(version):
        return Finding("ok", found, wanted.bounds)
    return Finding(
        "fail", found, wanted.bounds, "python3.11 -m venv .venv, or in a checkout: make run"
    )


def package(wanted: Requirement) -> Finding:
    """An installed package, looked up and not imported."""
    version = packages.installed(wanted.name)
    if version is not None and wanted.allows(version):
        return Finding("ok", version, wanted.bounds)
    remedy = packages.install_line(packages.unmet())
    return Finding("fail", version or "not installed", wanted.bounds or "any version", remedy)


def unknown() -> Finding:
    """Where nothing says what is required."""
    found = "lite-runner itself is not installed here, so what it requires is not known"
    return Finding("warn", found, remedy=f"{sys.executable} -m pip install . (in its checkout)")
