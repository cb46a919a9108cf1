"""A rank's end of its connection to the launcher, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lite_runner.distributed.events import Event
from lite_runner.errors import EXIT_FAILED

RANK = """
import sys, time
from pathlib import Path
from lite_runner.distributed.events import Sender
Sender(Path(sys.argv[1]), 0)
time.sleep(600)
"""


@pytest.mark.parametrize("unread", [True, False])
def test_a_rank_ends_with_its_launcher(tmp_path: Path, unread: bool) -> None:
    path = tmp_path / "events"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.bind(str(path))
        launcher.listen()
        with subprocess.Popen([sys.executable, "-c", RANK, str(path)]) as rank:
            try:
                connection, _ = launcher.accept()
                # Unread events make of the end a reset, which is an error of recv.
                connection.recv(1, socket.MSG_PEEK if unread else 0)
                if not unread:
                    connection.recv(1 << 16)
                    with pytest.raises(subprocess.TimeoutExpired):
                        rank.wait(0.2)
                connection.close()
                assert rank.wait(60) == EXIT_FAILED
            finally:
                rank.kill()


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b'{"rank": 0}', b'{"rank": "0", "event": "done"}', b'{"rank": 0, "event": "x"}',
     b'{"rank": 0, "event": "text", "more": 1}', b"\xff", b'{"rank": 0, "event": []}'],
)  # fmt: skip
def test_what_is_no_event_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        Event.from_line(line)


def test_an_event_survives_its_line() -> None:
    event = Event(
        rank=3, event="error", exit_code=4, message="a\nb \ud800", hint="é", traceback="t"
    )
    line = event.to_line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert Event.from_line(line) == event
