"""A worker process that tells of its progress, and the program that it runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lite_runner.backends.workers.process import WorkerProcess
from lite_runner.backends.workers.python import WorkerPython, worker_command
from lite_runner.errors import EnvironmentFault, RunnerError

OWN = WorkerPython("The Product", "NO_SUCH_VARIABLE", ".venv-none", "none", "product", "anyhow")
SCRIPT = """
import time

class Worker:
    def __init__(self, tell):
        self.tell = tell

    def work(self, events=0, pause=0.0):
        for number in range(events):
            time.sleep(pause)
            self.tell({"number": number})
        return {"done": "work"}

    def fail(self, events):
        self.work(events)
        raise RuntimeError("it cannot")

    def hide(self):
        raise RuntimeError("see the manual") from ValueError("disk full\\nmore")

    def say_nothing(self):
        raise RuntimeError(" ")

    def bury(self):
        try:
            raise ValueError("disk full\\nmore")
        except ValueError:
            raise RuntimeError("see the manual")

WORKER = Worker
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[WorkerProcess]:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = worker_command(Path(sys.executable), tmp_path / "script.py")
    started = WorkerProcess(OWN, command)
    yield started
    started.close()


def ask(process: WorkerProcess, seen: list[int], **request: Any) -> dict[str, Any]:
    return process.ask(
        {"op": "work", **request},
        seconds=20,
        doing="working",
        on_event=lambda event: seen.append(event["number"]),
    )


def test_events_come_before_the_answer(process: WorkerProcess) -> None:
    seen: list[int] = []
    assert ask(process, seen, events=3) == {"done": "work"}
    assert seen == [0, 1, 2]
    with pytest.raises(RunnerError, match="working: The Product failed: it cannot"):
        ask(process, seen, op="fail", events=1)
    assert ask(process, seen) == {"done": "work"}


@pytest.mark.parametrize("op", ["hide", "bury"])
def test_an_error_has_the_first_line_of_its_cause(process: WorkerProcess, op: str) -> None:
    with pytest.raises(RunnerError, match=r"see the manual \(from: disk full\)$"):
        ask(process, [], op=op)


def test_an_error_without_a_message(process: WorkerProcess) -> None:
    with pytest.raises(RunnerError, match="working: The Product failed: no message"):
        ask(process, [], op="say_nothing")


def test_a_signal_without_a_name(process: WorkerProcess) -> None:
    """One for real time, as a container's stop signal may be."""
    process.ask({"op": "ping"}, seconds=20, doing="starting")
    os.kill(process.pid, signal.SIGRTMIN + 6)
    with pytest.raises(RunnerError, match=rf"was killed by signal {signal.SIGRTMIN + 6}"):
        ask(process, [])


def test_another_thread_may_close_it(process: WorkerProcess) -> None:
    process.ask({"op": "ping"}, seconds=20, doing="starting")
    closing = threading.Timer(0.3, process.close)
    closing.start()
    request = {"op": "work", "events": 1, "pause": 30}
    with pytest.raises(RunnerError, match="working: The Product was closed"):
        process.ask(request, seconds=20, doing="working", on_event=lambda event: None)
    closing.join()
    assert process._answers.closed


def test_a_thread_that_waits_keeps_what_it_waits_for(process: WorkerProcess) -> None:
    """Another file may have the number of a closed one."""
    with process._reading:
        process.close()
        assert not process._answers.closed
    process.close()
    assert process._answers.closed


def test_the_time_runs_from_the_last_event(process: WorkerProcess) -> None:
    seen: list[int] = []
    request = {"op": "work", "events": 8, "pause": 0.2}
    process.ask({"op": "ping"}, seconds=20, doing="starting")
    on_event = {"on_event": lambda event: seen.append(event["number"])}
    process.ask(request, seconds=1, doing="working", **on_event)
    assert len(seen) == 8
    with pytest.raises(RunnerError, match=r"The Product gave no answer in 0\.1 s"):
        process.ask({**request, "pause": 5}, seconds=0.1, doing="working", **on_event)


def test_an_error_of_the_listener_ends_the_process(process: WorkerProcess) -> None:
    def stop(event: dict[str, Any]) -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        process.ask({"op": "work", "events": 2}, seconds=20, doing="working", on_event=stop)
    with pytest.raises(RunnerError, match="The Product was already closed"):
        ask(process, [])


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="cannot be started") as caught:
        WorkerProcess(OWN, worker_command(tmp_path / "python", tmp_path))
    assert caught.value.hint == "make product"
    with pytest.raises(EnvironmentFault, match=r"no Python with The Product: .*\.venv-none"):
        OWN.find()
