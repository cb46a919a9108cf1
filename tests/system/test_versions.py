"""A change of the code changes the names of what is kept between runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.system.versions import PACKAGE, code_digest


def added(package: Path) -> None:
    (package / "architectures/new.py").touch()


def changed(package: Path) -> None:
    with (package / "networks/decoder.py").open("a") as file:
        file.write("\n")


def moved(package: Path) -> None:
    (package / "networks/decoder.py").rename(package / "decoder.py")


def renamed(package: Path) -> None:
    (package / "networks").rename(package / "cells")


def removed(package: Path) -> None:
    (package / "backends/lite/engines/lite.py").unlink()


def swapped(package: Path) -> None:
    decoder, lora = package / "networks/decoder.py", package / "networks/lora.py"
    texts = decoder.read_bytes(), lora.read_bytes()
    lora.write_bytes(texts[0])
    decoder.write_bytes(texts[1])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of this package's source."""
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


@pytest.mark.parametrize("change", [added, changed, moved, renamed, removed, swapped])
def test_a_change_of_the_code_is_seen(package: Path, change: Callable[[Path], None]) -> None:
    assert code_digest(package) == code_digest()  # wherever it lies
    change(package)
    code_digest.cache_clear()
    assert code_digest(package) != code_digest()


def test_what_is_no_module_does_not_count(package: Path) -> None:
    (package / ".#llama.py").symlink_to("nowhere")
    (package / "networks/__pycache__").mkdir(exist_ok=True)
    (package / "networks/__pycache__/llama.cpython-311.pyc").touch()
    (package / "native/operators.so").touch()
    assert code_digest(package) == code_digest()
