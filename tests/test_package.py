"""`import lite_runner` and `python -m lite_runner`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lite_runner
from lite_runner.errors import ConfigError
from tests.paths import ROOT


def test_dir_lists_what_there_is() -> None:
    assert set(lite_runner.__all__) <= set(dir(lite_runner))
    assert sorted(set(lite_runner.__all__)) == sorted(lite_runner.__all__)
    for name in lite_runner.__all__:
        assert getattr(lite_runner, name).__module__.startswith("lite_runner") or name == "logger"
    with pytest.raises(AttributeError, match="no attribute 'pipelin'"):
        importlib.import_module("lite_runner").pipelin  # noqa: B018


def test_every_error_is_a_runner_error() -> None:
    with pytest.raises(lite_runner.RunnerError) as caught:
        lite_runner.AutoModel.from_pretrained("tiny_lama")
    assert isinstance(caught.value, ConfigError) and "tiny_llama" in str(caught.value)


def test_the_package_runs_as_the_program_does(tmp_path: Path) -> None:

    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "lite_runner", *arguments]
        env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert run("--version") == (0, f"lite-runner {lite_runner.__version__}\n", "")
    code, _, stderr = run("run_mode=predikt")
    assert code == 2 and "predict" in stderr
