"""Ranks of one machine that see each other through locked files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lite_runner.distributed import join
from lite_runner.distributed.join import RankLock, is_alive
from lite_runner.errors import EnvironmentFault
from tests.paths import ROOT

PATIENCE_S = 20.0
# Another rank: writes its text, waits for a line, and is gone without closing anything.
OTHER = """
import os, sys
from lite_runner.distributed.join import RankLock
lock = RankLock(sys.argv[1], int(sys.argv[2]))
lock.write(sys.argv[3])
print("there", flush=True)
end = sys.stdin.readline()
if end == "done\\n":
    lock.mark_done()
if end == "leave\\n":
    lock.leave()
os._exit(0)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(join.tempfile, "tempdir", None)


def other(rank: int, text: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, "a job", str(rank), text],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    return process


@pytest.mark.parametrize("end", ["done", "gone"])
def test_a_rank_that_is_gone(end: str) -> None:
    lock = RankLock("a job", 0)
    process = other(1)
    assert is_alive(lock.folder, 1) and not is_alive(lock.folder, 2)
    lost: list[int] = []
    noticed = threading.Event()
    lock.watch([1], lambda rank: (lost.append(rank), noticed.set()))
    process.communicate(f"{end}\n", timeout=PATIENCE_S)
    if end == "gone":
        assert noticed.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while lock._thread is not None and lock._thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lost == ([] if end == "done" else [1])


def test_a_rank_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "LOCK_TIMEOUT_S", 0.1)
    process = other(1)
    with pytest.raises(EnvironmentFault, match="another process is rank 1 of a job already"):
        RankLock("a job", 1)
    process.communicate("done\n", timeout=PATIENCE_S)
    RankLock("a job", 1)  # free again


def test_the_scheduler_of_rank_0() -> None:
    lock = RankLock("a job", 1)
    process = other(0, text="8118")
    assert lock.wait_for_port(PATIENCE_S) == 8118
    process.communicate("gone\n", timeout=PATIENCE_S)
    # What a rank wrote no longer counts when it is gone.
    with pytest.raises(EnvironmentFault, match="rank 0 did not start within 0 s"):
        lock.wait_for_port(0.3)


def test_the_last_rank_removes_the_folder() -> None:
    left = RankLock("another job", 0)
    (left.folder / "scheduler.log").touch()
    os.close(left._file)  # it was killed
    lock, process = RankLock("a job", 0), other(1)
    lock.mark_done()
    lock.leave()
    assert not left.folder.exists() and is_alive(lock.folder, 1)
    process.communicate("leave\n", timeout=PATIENCE_S)
    assert [one.name for one in lock.folder.parent.iterdir()] == ["lock"]


def test_ranks_join_while_others_leave() -> None:
    # Each of them finds its own lock in the folder that is there: nobody removed it meanwhile.
    program = """
import sys
from lite_runner.distributed.join import RankLock, is_alive
for _ in range(300):
    lock = RankLock("a job", int(sys.argv[1]))
    assert is_alive(lock.folder, int(sys.argv[1]))
    lock.leave()
"""
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank)], cwd=ROOT) for rank in range(3)
    ]
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0, 0]


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    folder = RankLock("a job", 0).folder.parent
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(EnvironmentFault, match="not a folder that only you may enter"):
        RankLock("a job", 1)
