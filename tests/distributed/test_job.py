"""Jobs that fail, under a real msrun: one message, the right exit code, and no process left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lite_runner.config.sections import Cluster
from lite_runner.distributed import job
from lite_runner.distributed.job import (
    Limits,
    exit_code,
    exit_text,
    has_ended,
    last_lines,
    run_ranks,
    scheduler_text,
    tail,
)
from lite_runner.errors import ArtifactError, EnvironmentFault, RunnerError

HERE = Path(__file__).resolve().parent
GONE_S = 60.0  # on a busy machine


def processes_of(marker: str) -> list[psutil.Process]:
    """The processes of a job: each has `marker` in its command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(marker in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until_gone(marker: str) -> None:
    wait_for(0, marker)


def wait_for(count: int, marker: str) -> None:
    """Wait until so many processes of a job are there."""
    deadline = time.monotonic() + GONE_S
    while len(found := processes_of(marker)) != count:
        assert time.monotonic() < deadline, [process.cmdline() for process in found]
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def others(request: pytest.FixtureRequest) -> None:
    """The first test has an msrun with all of MindSpore's package, the others do without."""
    if request.function is not test_text_and_notes_of_rank_0_come_through:
        request.getfixturevalue("light_msrun")


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[str]:
    """A text in the command line of every process of the test's job; what is left is killed."""
    text = f"marker of {tmp_path}"
    yield text
    for process in processes_of(text):
        process.kill()


def run(
    tmp_path: Path, marker: str, fault: str, limits: Limits | None = None, port: int | None = None
) -> None:
    program = [str(HERE / "stand_in.py"), fault, marker]
    run_ranks(program, Cluster(2, 2, master_port=port), tmp_path, limits or Limits(60))


def test_text_and_notes_of_rank_0_come_through(
    tmp_path: Path, marker: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_SIZE", "7")  # of another job
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    run(tmp_path, marker, "none", Limits(60, exit=20))
    shown = capsys.readouterr()
    assert shown.out == f"{marker}\n"
    assert shown.err == "2 ranks, SIGINT blocked: False\n"
    logs = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "msrun").iterdir()}
    assert set(logs.values()) == {0o640}
    assert logs.keys() == {"msrun.log", "scheduler.log", "worker_0.log", "worker_1.log"}
    wait_until_gone(marker)


@pytest.mark.parametrize(
    ("fault", "kind", "parts"),
    [
        ("reports", ArtifactError, ["rank 1: marker of", "\n      where it happened\n"]),
        (
            "exits",
            EnvironmentFault,
            ["rank 1 ended without a message: exit code 3", "    rank 1 is about to fail\n"],
        ),
        (
            "is killed",
            EnvironmentFault,
            ["1 ended without a message: killed by SIGKILL; ", "dmesg"],
        ),
    ],
)
def test_a_rank_that_fails_ends_all(
    tmp_path: Path, marker: str, fault: str, kind: type[RunnerError], parts: list[str]
) -> None:
    with pytest.raises(RunnerError) as caught:
        run(tmp_path, marker, fault)
    wait_until_gone(marker)
    assert type(caught.value) is kind
    text = str(caught.value)
    for part in (*parts, f"log: {tmp_path}/msrun/worker_1.log"):
        assert part in text
    assert text.endswith("\n  -> get another") is (fault == "reports")


def test_a_rank_that_is_suspended_is_named(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SCHEDULER_POLL_S", 0.2)
    with pytest.raises(RunnerError, match=r"rank 1 \(process \d+\) has been suspended") as caught:
        run(tmp_path, marker, "is suspended")
    assert "kill -CONT" in caught.value.hint
    wait_until_gone(marker)


def test_a_hang_ends_with_the_time(tmp_path: Path, marker: str) -> None:
    with pytest.raises(RunnerError, match=r"took longer than parallel\.timeout=5 s") as caught:
        run(tmp_path, marker, "hangs", Limits(60, total=5))
    wait_until_gone(marker)
    assert seconds_of_silence(str(caught.value)) <= 60


def seconds_of_silence(message: str) -> int:
    found = re.search(r"^  rank [01] has been silent for (\d+) s; last: \S", message, re.MULTILINE)
    assert found, message
    return int(found[1])


def test_ranks_that_never_meet(tmp_path: Path, marker: str) -> None:
    with pytest.raises(RunnerError, match="the ranks did not join within") as caught:
        run(tmp_path, marker, "never meets", Limits(5))
    wait_until_gone(marker)
    # Which rank has been silent for longest is what test_events.py asks, without a clock.
    assert seconds_of_silence(str(caught.value)) <= 60


def test_a_scheduler_that_ends(tmp_path: Path, marker: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        run(tmp_path, marker, "scheduler is killed")
    wait_until_gone(marker)
    message = "the scheduler was ended by signal 9 (SIGKILL); only the system kills like that"
    assert message in str(caught.value)
    assert f"log: {tmp_path}/msrun/scheduler.log" in str(caught.value)


def test_the_exit_code_of_a_process_that_is_not_waited_for() -> None:
    for word, code in (("exit 3", 3), ("kill -9 $$", -9), ("kill -6 $$", -6)):
        process = subprocess.Popen(["sh", "-c", word])
        while not has_ended(psutil.Process(process.pid)):
            time.sleep(0.01)
        assert exit_code(process.pid) == code
        assert process.wait() == code
        assert exit_code(process.pid) is None
    assert exit_code(os.getpid()) is None


def test_a_port_that_is_taken(tmp_path: Path, marker: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"cannot join at 127.0.0.1:{port}"):
            run(tmp_path, marker, "none", port=port)
    assert not processes_of(marker)


def drive(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    tmp_path.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(HERE / "drive.py"), str(tmp_path), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


@pytest.mark.parametrize(
    ("number", "code", "says"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGKILL, -9, "")]
)
def test_a_launcher_that_is_ended_takes_all_with_it(
    tmp_path: Path, marker: str, number: signal.Signals, code: int, says: str
) -> None:
    launcher = drive(tmp_path, "hangs", marker)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "waiting\n"
    wait_for(5, marker)  # this launcher, msrun, the scheduler, two ranks
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=GONE_S)
    assert (launcher.returncode, errors) == (code, says)
    wait_until_gone(marker)


def interrupted(tmp_path: Path, fault: str, marker: str) -> subprocess.Popen[str]:
    """A launcher that has got Ctrl-C while its ranks generate."""
    launcher = drive(tmp_path, fault, marker)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "generating\n"
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout.readline() == "stopped\n"  # by rank 0
    return launcher


def test_ranks_that_generate_come_to_an_end_at_ctrl_c(tmp_path: Path, marker: str) -> None:
    launcher = interrupted(tmp_path, "stops", marker)
    assert launcher.communicate() == ("", "interrupted\n")
    assert launcher.returncode == 130
    wait_until_gone(marker)


def test_a_second_ctrl_c_ends_all(tmp_path: Path, marker: str) -> None:
    launcher = interrupted(tmp_path, "is deaf", marker)
    launcher.send_signal(signal.SIGINT)
    assert launcher.communicate(timeout=GONE_S) == ("", "interrupted\n")
    assert launcher.returncode == 130
    wait_until_gone(marker)


def test_ranks_that_do_not_stop_are_ended(
    tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "STOP_S", 1.0)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, marker, "is interrupted and deaf")
    wait_until_gone(marker)
    assert capsys.readouterr().err == "the ranks did not stop within 1 s and were ended\n"


def test_msrun_that_is_killed(tmp_path: Path, marker: str) -> None:
    launcher = drive(tmp_path, "hangs", marker)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "waiting\n"
    (msrun,) = psutil.Process(launcher.pid).children()
    msrun.kill()
    _, errors = launcher.communicate(timeout=GONE_S)
    assert launcher.returncode == 1
    assert errors.startswith("error: msrun ended before its ranks were done: killed by SIGKILL\n")
    wait_until_gone(marker)


def two_nodes(tmp_path: Path, marker: str, fault: str) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [
        drive(tmp_path / str(node), fault, marker, "2", str(node), str(port)) for node in range(2)
    ]


def test_a_second_node_notices_the_end_of_the_first(tmp_path: Path, marker: str) -> None:
    nodes = two_nodes(tmp_path, marker, "node 0 is killed")
    assert nodes[0].stdout is not None
    assert nodes[0].stdout.readline() == "waiting\n"
    log = tmp_path / "1/msrun/worker_1.log"
    while not (log.exists() and log.read_text()):  # its rank is up, too
        time.sleep(0.05)
    nodes[0].kill()
    _, errors = nodes[1].communicate(timeout=2 * GONE_S)
    assert nodes[1].returncode == 1
    assert errors.startswith("error: the machine with node_rank 0 (127.0.0.1:")
    nodes[0].communicate()
    wait_until_gone(marker)


def test_two_nodes_on_loopback(tmp_path: Path, marker: str) -> None:
    nodes = two_nodes(tmp_path, marker, "none")
    first, second = (node.communicate(timeout=2 * GONE_S) for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], (first, second)
    assert first == (f"{marker}\n", "2 ranks, SIGINT blocked: False\n")
    assert second == ("", "")
    assert (tmp_path / "1/msrun/worker_1.log").is_file()
    wait_until_gone(marker)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-77, "by signal 77")],
)
def test_an_exit_code_in_words(code: int, expected: str) -> None:
    assert expected in exit_text(code)


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (-9, "timed out node", "the scheduler was ended by signal 9 (SIGKILL)"),
        (1, "The total number of timed out node is 1.", "the scheduler has lost a rank"),
        (None, "", "the scheduler has lost a rank"),
        (1, "", "the scheduler ended before its ranks were done: exit code 1"),
    ],
)
def test_reasons_of_a_scheduler_that_ended(code: int | None, log: str, expected: str) -> None:
    assert scheduler_text(code, log) == expected


def test_the_end_of_a_log_is_reported(tmp_path: Path) -> None:
    """Its last lines, without those that are empty."""
    lines = [f"line {number}" for number in range(20)]
    assert last_lines("\n\n".join(lines)) == [f"    {line}" for line in lines[-8:]]
    assert last_lines("\nalone\n \n") == ["    alone"]
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"x" * 70_000 + b"\xff\nend")
    assert len(tail(log)) == 1 << 16 and tail(log).endswith("\ufffd\nend")
