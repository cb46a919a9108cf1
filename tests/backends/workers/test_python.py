"""Running scripts of workers, and showing their logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.backends.workers import python as workers_python
from lite_runner.backends.workers.python import (
    WorkerPython,
    isolated,
    quoted_tail,
    worker_command,
    worker_environment,
)
from lite_runner.errors import EnvironmentFault


def test_a_worker_of_a_rank_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MS_ROLE", "RANK_ID", "DEVICE_ID", "MS_SCHED_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    environment = worker_environment()
    assert not environment.keys() & {"MS_ROLE", "RANK_ID", "DEVICE_ID", "MS_SCHED_PORT"}
    assert environment["ASCEND_RT_VISIBLE_DEVICES"] == "3"


def test_an_environment_that_is_being_set_up_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_python, "_CHECKOUT", tmp_path)
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "conf").mkdir()
    python = tmp_path / ".venv-x/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    x = WorkerPython("X", "X_PYTHON", ".venv-x", "x", "x", "make {cached}")
    assert x.find() == python
    (tmp_path / ".venv-x/.unfinished").touch()
    with pytest.raises(EnvironmentFault, match=r"X: .*x is not set up to the end") as caught:
        x.find()
    assert caught.value.hint == "wait until the set-up has ended, or: make x"


def test_a_script_sees_nothing_of_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isolated(Path("/p"), Path("/s.py"), "x") == ["/p", "-I", "-B", "/s.py", "x"]
    main, script = worker_command(Path("/p"), Path("/s.py"))[-2:]
    assert Path(main).name == "main.py" and script == "/s.py"
    monkeypatch.setenv("LD_LIBRARY_PATH", "/venv/mindspore/lib/plugin/cpu")
    assert "LD_LIBRARY_PATH" not in worker_environment()


def test_the_tail_of_a_log() -> None:
    assert quoted_tail("\n \n") == ""
    assert quoted_tail("a\n\nb  \n") == "; it wrote:\n    a\n    b"
    assert quoted_tail("\n".join("x" * 999 for _ in range(99))).count("x") == 8 * 300
