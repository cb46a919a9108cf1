"""Liveness of the ranks of one machine: a folder with a lock file for each rank.

A job that another launcher starts, such as a loop over a rank table, may have no supervisor. Each
rank locks its file for its lifetime, however it ends. So the others detect a rank that ends before
its work is done, and end too: a collective would wait for it forever. The file of rank 0 also holds
the port of a scheduler that it has started.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lite_runner.errors import EnvironmentFault

POLL_S = 0.2
LOCK_TIMEOUT_S = 15.0  # for the same rank of the previous job to end
_DONE = "done"


class RankLock:
    """This rank's lock file among those of the ranks of the job `key` on this machine."""

    def __init__(self, key: str, rank: int) -> None:
        """Lock this rank's file. Raises EnvironmentFault if another process holds the lock."""
        self.folder = _private_folder(key)
        self._file = os.open(self.folder / str(rank), os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _lock(self._file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"another process is rank {rank} of {key} already",
                    "wait for that job to end, or end it",
                )
            time.sleep(POLL_S)
        self.write("")
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Replace the content of this rank's file, which the others read."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)

    def mark_done(self) -> None:
        """This rank's work is complete: that it ends now is no failure."""
        self.write(_DONE)

    def stop_watching(self) -> None:
        """End the watching thread: MindSpore's finalization crashes beside a running thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def wait_for_port(self, timeout: float) -> int:
        """The port of rank 0's scheduler, once its file has it. Raises EnvironmentFault."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if is_alive(self.folder, 0) and (text := _content(self.folder, 0)).isdecimal():
                return int(text)
            time.sleep(POLL_S)
        raise EnvironmentFault(
            f"rank 0 did not start within {timeout:.0f} s",
            "see its messages; every rank of the loop must be started",
        )

    def watch(self, ranks: Iterable[int], lost: Callable[[int], None]) -> None:
        """Watch the other `ranks`, all of which are alive, in a thread: `lost` is called with the
        first one that ends without having marked itself done."""
        arguments = (list(ranks), lost)
        self._thread = threading.Thread(target=self._watch, args=arguments, daemon=True)
        self._thread.start()

    def _watch(self, others: list[int], lost: Callable[[int], None]) -> None:
        while others and not self._over.wait(POLL_S):
            for rank in [rank for rank in others if not is_alive(self.folder, rank)]:
                others.remove(rank)
                if _content(self.folder, rank) != _DONE:
                    lost(rank)
                    return


def is_alive(folder: Path, rank: int) -> bool:
    """Whether a process holds the lock of this rank in the job's folder."""
    with suppress(FileNotFoundError):
        file = os.open(folder / str(rank), os.O_RDONLY)
        try:
            return not _lock(file, fcntl.LOCK_SH)
        finally:
            os.close(file)  # and the lock with it
    return False


def _content(folder: Path, rank: int) -> str:
    with suppress(FileNotFoundError):
        return (folder / str(rank)).read_text(encoding="ascii", errors="replace")
    return ""


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _private_folder(key: str) -> Path:
    """A folder that only this user may enter, the same for every process with this `key`."""
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"lite_runner-ranks-{os.getuid()}-{name}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EnvironmentFault(
            f"{path}: not a folder that only you may enter", "remove it, or set TMPDIR"
        )
    return path
