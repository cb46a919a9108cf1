"""Answers from child processes that may crash or hang."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from lite_runner import native
from lite_runner.distributed.job import has_ended
from lite_runner.doctor import probe
from lite_runner.errors import EnvironmentFault
from tests.native.conftest import KERNELS


def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have the child that answers run `code`."""
    path = tmp_path / "probe.py"
    path.write_text(code)
    monkeypatch.setattr(probe, "_PROBE", path)


def lives(pid: int) -> bool:
    try:
        return not has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def test_our_operators_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.ask("operators", 60).partition(";")[0] in KERNELS
    for state, suffix in (
        ("", ""),
        ("used", ""),
        (
            "the system does not grant it",
            "; this processor has AMX, which is not used: the system does not grant it",
        ),
    ):
        monkeypatch.setattr(native, "amx", lambda state=state: state)
        assert probe.operators() == native.instructions() + suffix


def test_a_runner_error_keeps_its_hint() -> None:
    with pytest.raises(EnvironmentFault, match="mindspore_lite does not import") as caught:
        probe.ask("lite", 60)
    assert "install the wheel of MindSpore Lite" in caught.value.hint


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os.abort()", "was killed by SIGABRT"),
        ("import os; os.kill(os.getpid(), 63)", "was killed by signal 63"),
        ("raise ValueError('odd')", "ended with exit code 1\n(.*\n)* *ValueError: odd"),
        ("raise SystemExit(3)", "ended with exit code 3"),
    ],
)
def test_a_crash_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    answers(tmp_path, monkeypatch, code)
    with pytest.raises(EnvironmentFault, match=message):
        probe.ask("operators", 60)


def test_a_hanging_process_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    inner = "import time; time.sleep(600)"
    outer = (
        "import os, subprocess, sys, time\n"
        f"started = subprocess.Popen([sys.executable, '-c', {inner!r}])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{started.pid}}')\n"
        "time.sleep(600)"
    )
    with pytest.raises(EnvironmentFault, match="no end within 2 s"):
        probe.run([sys.executable, "-c", outer], 2)
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2
    deadline = time.monotonic() + 10  # for the kernel to end what was killed
    while any(lives(pid) for pid in left):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_process_started_does_not_outlive_it() -> None:
    left = int(probe.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], 30).output)
    deadline = time.monotonic() + 10
    while lives(left):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_failed_start_is_reported(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="no_program: cannot be started: No such file"):
        probe.run([str(tmp_path / "no_program")], 5)


def test_output_that_is_no_text_is_read() -> None:
    ended = probe.run([sys.executable, "-c", "import os; os.write(1, b'\\xff 1')"], 60)
    assert (ended.code, ended.output) == (0, "\ufffd 1")
