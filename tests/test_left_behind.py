"""Tests that write to the checkout fail their session."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

WRITES = {
    "(ROOT / 'outputs').mkdir()": ["new: outputs"],
    "(ROOT / 'data.json').write_text('other')": ["changed: data.json"],
    "(ROOT / 'data.json').unlink()": ["gone: data.json"],
    "(ROOT / 'link').unlink(); (ROOT / 'link').symlink_to('data.json')": ["changed: link"],
    # Its own folder, and what people edit while tests run.
    "Path('x').touch(); (ROOT / 'new.py').touch()": [],
}


@pytest.mark.parametrize(("writes", "told"), WRITES.items())
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_test_writes_is_named(
    tmp_path: Path, writes: str, told: list[str], workers: int
) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("conftest.py", "left_behind.py", "paths.py"):
        shutil.copy(ROOT / "tests" / name, tests)
    (tests / "test_some.py").write_text(
        f"from pathlib import Path\nfrom tests.paths import ROOT\ndef test_it(): {writes}\n"
    )
    (tmp_path / "data.json").write_text("{}")
    (tmp_path / "link").symlink_to("elsewhere")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"-n{workers}", "tests"],
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert any("1 passed" in line for line in lines), done.stdout
    assert done.returncode == bool(told)
    assert [one for one in lines if one.startswith(("new: ", "changed: ", "gone: "))] == told
