"""Tests that write to the checkout fail their session."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import CONFTEST, ROOT

# By tests, of which some write nothing that counts: to their own folder, and what people edit while
# tests run.
WRITES = {
    "(ROOT / 'outputs').mkdir()": "new: outputs",
    "(ROOT / 'data.json').write_text('other')": "changed: data.json",
    "(ROOT / 'more.json').unlink()": "gone: more.json",
    "(ROOT / 'link').unlink(); (ROOT / 'link').symlink_to('data.json')": "changed: link",
    "Path('x').touch(); (ROOT / 'new.py').touch()": "",
}


@pytest.mark.parametrize("writes", [[*WRITES], [*WRITES][-1:]], ids=["some", "none"])
@pytest.mark.parametrize("workers", [0, 1])
def test_files_that_tests_leave_are_named(tmp_path: Path, writes: list[str], workers: int) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in CONFTEST:
        shutil.copy(ROOT / "tests" / name, tests)
    lines = [f"def test_{number}(): {one}\n" for number, one in enumerate(writes)]
    imports = ["from pathlib import Path\n", "from tests.paths import ROOT\n"]
    (tests / "test_some.py").write_text("".join([*imports, *lines]))
    for name in ("data.json", "more.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "link").symlink_to("elsewhere")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"-n{workers}", "tests"],
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert any(f"{len(writes)} passed" in line for line in lines), done.stdout
    named = sorted(filter(None, map(WRITES.__getitem__, writes)))
    assert done.returncode == bool(named)
    assert sorted(one for one in lines if one.startswith(("new: ", "changed: ", "gone: "))) == named
