"""Runs scripts of scripts/: as programs, or in this process, which saves their start."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

Done = subprocess.CompletedProcess[str]


def run_program(folder: Path, name: str, *flags: str) -> Done:
    """As it is typed in `folder`."""
    command = [sys.executable, str(ROOT / "scripts" / name), *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")


def run_script(folder: Path, name: str, *flags: str) -> Done:
    """The same by its main()."""
    path = str(ROOT / "scripts" / name)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patch.chdir(folder)
        patch.setattr("sys.argv", [path, *flags])
        patch.setattr("sys.path", [*sys.path])
        try:
            code = runpy.run_path(path)["main"]()
        except SystemExit as ended:  # of argparse
            code = ended.code
    return Done([path, *flags], code, out.getvalue(), err.getvalue())
