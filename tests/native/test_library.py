"""The library of the operators: stale and missing builds are refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lite_runner import native
from lite_runner.errors import EnvironmentFault
from lite_runner.native import fingerprint


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bytes | None], EnvironmentFault]:
    """The error of `library` for a file of these bytes, or none."""

    def refused(content: bytes | None) -> EnvironmentFault:
        monkeypatch.setattr(native, "LIBRARY", tmp_path / "operators.so")
        if content is not None:
            native.LIBRARY.write_bytes(content)
        with pytest.raises(EnvironmentFault) as caught:
            native.library.__wrapped__()  # past what is kept of the true one
        return caught.value

    return refused


def test_missing_builds_are_reported(refused: Callable[[bytes | None], EnvironmentFault]) -> None:
    fault = refused(None)
    assert "this run needs this project's own operators, which were not built" in str(fault)
    assert "C++ compiler" in fault.hint


def test_a_library_of_other_sources_is_not_used(
    refused: Callable[[bytes | None], EnvironmentFault], other_operators: Path
) -> None:
    fault = refused(other_operators.read_bytes())
    assert "which were built from other sources than those beside them" in str(fault)
    assert "python setup.py build_ext --inplace" in fault.hint


def test_a_library_of_before_says_nothing_of_its_sources_and_is_not_used(
    refused: Callable[[bytes | None], EnvironmentFault],
) -> None:
    extension = np.core._multiarray_umath.__file__  # any that is not ours
    assert "built from other sources" in str(refused(Path(extension).read_bytes()))


def test_a_change_of_the_sources_is_another_fingerprint(tmp_path: Path) -> None:
    """Of a name, of a byte, and of where one file ends; what no compiler reads is none."""

    def taken(folder: Path) -> str:
        script = (
            f"import runpy; print(runpy.run_path({str(folder / 'fingerprint.py')!r})['sources']())"
        )
        return subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True
        ).stdout.strip()

    def changed(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(Path(native.__file__).parent, folder, ignore=shutil.ignore_patterns("*.so"))
        return folder

    same, renamed, edited, moved = map(changed, ("same", "renamed", "edited", "moved"))
    (same / "src/operators.cc~").write_text("an editor's")
    (renamed / "src/scratch.h").rename(renamed / "src/scrap.h")
    (edited / "src/layers.h").write_bytes((edited / "src/layers.h").read_bytes() + b" ")
    first, second = moved / "src/threads.cc", moved / "src/threads.h"
    whole = first.read_bytes() + second.read_bytes()
    first.write_bytes(whole[:99])
    second.write_bytes(whole[99:])
    assert taken(same) == fingerprint.sources()
    found = {taken(folder) for folder in (same, renamed, edited, moved)}
    assert len(found) == 4
