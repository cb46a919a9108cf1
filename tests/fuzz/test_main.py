"""`make fuzz` in a short and deterministic run, and with a fault for it to find."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import children
from fuzz.children import Case
from lite_runner.errors import ArtifactError
from tests.paths import ROOT


def test_damaged_files_end_in_runner_errors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "--mutations", "1", "--seed", "0", "--out", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" mutations, 0 findings")


def reads(folder: Path) -> None:
    """A reader controlled by its file."""
    match (folder / "x").read_bytes():
        case b"ours":
            raise ArtifactError("x: broken")
        case b"other":
            raise ValueError("what a user would see a traceback of")
        case b"memory":
            bytearray(2 << 30)
        case b"crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"hang":
            while True:
                pass


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"read", None),
        (b"ours", None),
        (b"other", "ValueError"),
        (b"memory", "MemoryError"),
        (b"crash", "killed by SIGKILL"),
        (b"hang", "hung for more than 1 s"),
    ],
)
def test_findings(
    content: bytes, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "HANG_S", 1.0)
    monkeypatch.setattr(children, "PLAIN", 0.0)
    work = tmp_path / "work"
    work.mkdir()
    (work / "x").write_bytes(b"as it was")
    case = Case("case", work, "x", lambda data, random: content, reads)
    found = children.run(case, 0, range(2), work)
    kinds = [(one.index, one.kind.partition(" at ")[0]) for one in found]
    assert kinds == ([] if kind is None else [(0, kind), (1, kind)])
