"""How scripts of workers are run, and what is shown of their logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.backends.workers.python import (
    isolated,
    quoted_tail,
    worker_command,
    worker_environment,
)


def test_a_worker_of_a_rank_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MS_ROLE", "RANK_ID", "DEVICE_ID", "MS_SCHED_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    environment = worker_environment()
    assert not environment.keys() & {"MS_ROLE", "RANK_ID", "DEVICE_ID", "MS_SCHED_PORT"}
    assert environment["ASCEND_RT_VISIBLE_DEVICES"] == "3"


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
