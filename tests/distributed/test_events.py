"""A rank's end of its connection to the launcher, in a process of its own; and the launcher's,
against that and against anything else."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lite_runner.distributed.events import MAX_LINE_BYTES, MET, Event, Kind, RankMonitor
from lite_runner.errors import EXIT_FAILED, EnvironmentFault
from tests.each import each

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


@each(
    "line",
    [b"", b"[]", b'{"rank": 0}', b'{"rank": "0", "event": "done"}', b'{"rank": 0, "event": "x"}',
     b'{"rank": 0, "event": "text", "more": 1}', b"\xff", b'{"rank": 0, "event": []}'],
)  # fmt: skip
def test_an_invalid_event_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        Event.from_line(line)


def test_an_event_survives_its_line() -> None:
    event = Event(
        rank=3, event="error", exit_code=4, message="a\nb \ud800", hint="é", traceback="t"
    )
    line = event.to_line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert Event.from_line(line) == event


@pytest.fixture
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "events"


@pytest.fixture
def monitor(events: Path) -> Iterator[RankMonitor]:
    with closing(RankMonitor(events, range(2, 4))) as monitor:
        yield monitor


class Rank:
    """The other end, byte by byte."""

    def __init__(self, monitor: RankMonitor, events: Path) -> None:
        self.monitor = monitor
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.stream.connect(str(events))
        monitor.read(1)

    def send(self, *lines: bytes) -> None:
        self.stream.sendall(b"".join(lines))
        self.monitor.read(1)

    def close(self) -> None:
        self.stream.close()
        self.monitor.read(1)


def line(rank: int, kind: Kind, text: str = "") -> bytes:
    return Event(rank=rank, event=kind, text=text).to_line()


def test_ranks_start_join_and_exit(monitor: RankMonitor, events: Path) -> None:
    assert monitor.status() == "0 of 2 ranks up: starting"
    ranks = [Rank(monitor, events) for _ in range(2)]
    ranks[0].send(line(2, "stage", "started"))
    assert monitor.status() == "1 of 2 ranks up: started"
    ranks[1].send(line(3, "stage", "started"), line(3, "stage", MET), line(3, "stage", "load"))
    assert monitor.slowest() == 2 and not monitor.all_met  # 3 is not what the others wait for
    ranks[0].send(line(2, "stage", MET))
    assert monitor.all_met and not monitor.all_done
    for number, rank in zip((2, 3), ranks, strict=True):
        rank.send(line(number, "done"))
        rank.close()
    assert monitor.all_done and monitor.failure is None


def test_one_read_takes_all_available_data(monitor: RankMonitor, events: Path) -> None:
    """A rank may connect, finish and exit between two reads."""
    for rank in (2, 3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.connect(str(events))
            stream.sendall(line(rank, "stage", MET) + line(rank, "done"))
    monitor.read(0)
    assert monitor.all_done and monitor.failure is None


def test_a_line_in_two_parts_and_lines_together(
    monitor: RankMonitor, events: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(monitor, events)
    whole = line(2, "text", "早上好") + line(2, "text", ", a\n")
    rank.send(whole[:10])
    assert capsys.readouterr().out == ""
    rank.send(whole[10:])
    assert capsys.readouterr().out == "早上好, a\n"


def test_only_the_first_failure_counts(monitor: RankMonitor, events: Path) -> None:
    first, second = Rank(monitor, events), Rank(monitor, events)
    failed = Event(rank=3, event="error", exit_code=4, message="m", hint="h", traceback="t")
    second.send(failed.to_line())
    first.send(line(2, "stage", "started"))
    first.close()
    second.close()
    assert monitor.failure == failed


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"{}\n",
        b"[" * 100_000 + b"\n",
        b'{"rank": 2, "event": "shout"}\n',
        b'{"rank": 1, "event": "done"}\n',  # of another machine
        b'{"rank": 3, "event": "done"}\n',  # in another rank's name
        b"\xff\xfe\n",
    ],
)
def test_a_rank_that_sends_garbage_has_failed(
    monitor: RankMonitor, events: Path, garbage: bytes
) -> None:
    stranger = Rank(monitor, events)
    stranger.send(garbage)
    assert monitor.failure is None or garbage.endswith(b'"done"}\n')
    rank = Rank(monitor, events)
    rank.send(line(2, "stage", "started"))
    rank.send(garbage)
    while monitor.failure is None:
        monitor.read(1)
    assert monitor.failure == Event(rank=2, event="error", exit_code=EXIT_FAILED)
    assert not monitor.ranks[2].done


def test_a_line_without_end_is_not_kept(monitor: RankMonitor, events: Path) -> None:
    rank = Rank(monitor, events)
    rank.send(line(2, "stage", "started"))
    sent = 0
    while monitor.failure is None:
        sent += rank.stream.send(b"x" * 65536)
        monitor.read(1)
    assert sent <= MAX_LINE_BYTES + 2 * 65536


def test_a_folder_too_deep_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"AF_UNIX path too long[\s\S]*TMPDIR"):
        RankMonitor(tmp_path / ("x" * 100), range(1))
