"""Cache of binaries that tests compile for minutes."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from filelock import FileLock

from lite_runner.native import fingerprint


def kept(
    factory: pytest.TempPathFactory,
    name: str,
    compiler: str,
    settings: Iterable[str],
    build: Callable[[], Path],
) -> Path:
    """A copy of what `build` gives; it is kept beside pytest's own temporary folders, which are the
    user's alone, until a source of the kernels, one of the settings or the compiler changes."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    text = " ".join([compiler, fingerprint.sources(), *settings])
    base = factory.getbasetemp()
    root = next((one for one in base.parents if one.name.startswith("pytest-of-")), base)
    folder = root / f"lite-runner-{name}"
    folder.mkdir(exist_ok=True)
    file = folder / hashlib.sha256(text.encode() + version).hexdigest()
    with FileLock(folder / ".lock"):
        if not file.exists():
            built = build()
            for old in folder.iterdir():
                if old.name != ".lock":
                    old.unlink()
            Path(shutil.copy(built, folder / "unfinished")).replace(file)
        return Path(shutil.copy(file, factory.mktemp(name) / name))
