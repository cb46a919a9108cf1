"""Joining the other ranks of a job: their scheduler, and the liveness of those of this machine.

A job that another launcher starts, such as a loop over a rank table, may have no supervisor. Each
rank locks a file for its lifetime, however it ends. So the others detect a rank that ends before
its work is done, and end too: a collective would wait for it forever. Rank 0 starts a scheduler
where the launcher has none, and writes its port to its file:

    python -m lite_runner.distributed.join FOLDER SIZE PORT TIMEOUT

FOLDER holds the lock files of the ranks; the scheduler runs as long as one of them does. The last
rank that leaves removes it, and what jobs that were killed have left.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lite_runner import profiler
from lite_runner.config.sections import hccl_timeouts
from lite_runner.distributed.membership import Member
from lite_runner.distributed.msrun_wrapper import PARENT_VARIABLE, SCHEDULES_VARIABLE
from lite_runner.errors import EXIT_FAILED, EnvironmentFault
from lite_runner.records import dataclass
from lite_runner.system import environment
from lite_runner.system.secret import without_keys

SCHEDULER_HOST = "127.0.0.1"
SCHEDULER_POLL_S = 1.0
MAX_ALONE = 3  # polls in a row that find no rank
_PACKAGE = Path(__file__).resolve().parents[1]
LOCK_POLL_S = 0.2
LOCK_TIMEOUT_S = 15.0  # for the same rank of the previous job to end
_DONE = "done"


@dataclass(frozen=True)
class Joined:
    """This process as a rank of a job; all ranks have joined."""

    rank: int
    size: int
    local_ranks: tuple[int, ...]  # on this machine
    lock: RankLock | None  # None: the launcher of the run watches its ranks

    @property
    def leads(self) -> bool:
        """True for the one rank that works for all of its machine."""
        return self.rank == self.local_ranks[0]


def join(
    member: Member,
    device: str,
    device_id: int,
    timeout: int,
    hccl_timeout: int,
    *,
    launched: bool = False,
) -> Joined:
    """Join the other ranks, within `timeout` s unless the environment sets another; once a process.

    If a rank of this machine ends before its work is done, this process ends too, unless the
    launcher of the run has started it. Raises EnvironmentFault.
    """
    os.environ.setdefault("MS_TOPO_TIMEOUT", str(timeout))
    if device == "Ascend":
        os.environ.update(hccl_timeouts(hccl_timeout))
    # Run after what MindSpore registers: until then this process has its rank and its device.
    lock, leaving = None, ExitStack()
    atexit.register(leaving.close)
    if member.scheduler is None:
        assert member.table is not None and member.rank is not None
        lock = RankLock(str(member.table), member.rank)
        if device == "CPU":
            _find_scheduler(member, lock, timeout)
    elif member.rank is not None:  # in a container neither is set
        os.environ.update(MS_NODE_ID=str(member.rank), RANK_ID=str(member.rank))
    with profiler.phase("import"):
        environment.import_mindspore()
        from lite_runner.backends import collectives
        from lite_runner.backends.mindspore.device import set_device

    set_device(device, device_id)
    rank, size = collectives.join(member.name)
    os.environ.update(RANK_ID=str(rank), DEVICE_ID=str(device_id))  # if unset so far
    if lock is None and not launched:
        assert member.scheduler is not None
        lock = RankLock(f"{member.scheduler.host}:{member.scheduler.port}", rank)
    hosts = collectives.gather(socket.gethostname().encode())
    local_ranks = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
    if lock is not None:
        leaving.callback(lock.leave)
        lock.write("")  # the scheduler's port is no longer needed
        lock.watch((other for other in local_ranks if other != rank), _exit)
    return Joined(rank, size, local_ranks, lock)


def _find_scheduler(member: Member, lock: RankLock, timeout: int) -> None:
    """Set the environment variables of a dynamic cluster, which a loop over a rank table lacks."""
    if member.rank == 0:
        port = start_scheduler(lock.folder, member.size, timeout)
        lock.write(str(port))
    else:
        port = lock.wait_for_port(timeout)
    os.environ.update(
        MS_ROLE="MS_WORKER",
        MS_WORKER_NUM=str(member.size),
        MS_SCHED_HOST=SCHEDULER_HOST,
        MS_SCHED_PORT=str(port),
        MS_NODE_ID=str(member.rank),
    )


def _exit(rank: int) -> None:
    """Exit at once: a collective would wait for the lost `rank` forever."""
    text = f"error: rank {rank} has ended before its work was done; see its messages"
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


class RankLock:
    """This rank's lock file among those of the ranks of the job `key` on this machine."""

    def __init__(self, key: str, rank: int) -> None:
        """Lock this rank's file. Raises EnvironmentFault if another process holds the lock."""
        self.folder = _own_folder() / hashlib.sha256(key.encode()).hexdigest()[:16]
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while (file := _taken(self.folder, rank)) is None:
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"another process is rank {rank} of {key} already",
                    "wait for that job to end, or end it",
                )
            time.sleep(LOCK_POLL_S)
        self._file = file
        self.write("")
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Replace the content of this rank's file, which the others read."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text.encode(), 0)

    def mark_done(self) -> None:
        """This rank's work is complete: ending now is not a failure."""
        self.write(_DONE)

    def stop_watching(self) -> None:
        """End the watching thread: MindSpore's finalization crashes beside a running thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def leave(self) -> None:
        """Give the rank up, and remove the folders of this user's jobs that no rank is left of."""
        os.close(self._file)
        with suppress(OSError), _alone(self.folder.parent):
            for folder in self.folder.parent.iterdir():
                if folder.is_dir() and not any(is_alive(folder, rank) for rank in _ranks(folder)):
                    shutil.rmtree(folder)

    def wait_for_port(self, timeout: float) -> int:
        """The port of rank 0's scheduler, once its file has it. Raises EnvironmentFault."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if is_alive(self.folder, 0) and (text := _content(self.folder, 0)).isdecimal():
                return int(text)
            time.sleep(LOCK_POLL_S)
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
        while others and not self._over.wait(LOCK_POLL_S):
            for rank in [rank for rank in others if not is_alive(self.folder, rank)]:
                others.remove(rank)
                if _content(self.folder, rank) != _DONE:
                    lost(rank)
                    return


def is_alive(folder: Path, rank: int) -> bool:
    """True while a process holds the lock of this rank in the job's folder."""
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


def _own_folder() -> Path:
    """The folder of this user's jobs, which other users cannot enter."""
    folder = Path(tempfile.gettempdir()) / f"lite_runner-ranks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EnvironmentFault(
            f"{folder}: not a folder that only you may enter", "remove it, or set TMPDIR"
        )
    return folder


@contextmanager
def _alone(jobs: Path) -> Iterator[None]:
    """Keep others from joining a job of this user, and from removing its folder."""
    file = os.open(jobs / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _taken(folder: Path, rank: int) -> int | None:
    """A rank's file in its job's folder, locked; None while another process has the lock."""
    with _alone(folder.parent):
        folder.mkdir(exist_ok=True)
        file = os.open(folder / str(rank), os.O_RDWR | os.O_CREAT, 0o600)
        if _lock(file, fcntl.LOCK_EX):
            return file
        os.close(file)
        return None


def _ranks(folder: Path) -> list[int]:
    """The ranks that have joined a job so far."""
    return [int(one.name) for one in folder.iterdir() if one.name.isdecimal()]


def start_scheduler(folder: Path, size: int, timeout: int) -> int:
    """Start the scheduler of `size` ranks, which must join within `timeout` s; returns its port."""
    with socket.create_server((SCHEDULER_HOST, 0)) as free:
        port = int(free.getsockname()[1])
    path = filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")])
    with (folder / "scheduler.log").open("wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), str(size), str(port), str(timeout)],
            env={**without_keys(os.environ), "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # rank 0 may end before the others
        )
    return port


def main(folder: Path, size: int, port: int, timeout: int) -> None:
    """Run MindSpore's scheduler until it exits, or no rank is left."""
    settings = {
        "MS_ROLE": "MS_SCHED",
        "MS_WORKER_NUM": str(size),
        "MS_SCHED_HOST": SCHEDULER_HOST,
        "MS_SCHED_PORT": str(port),
        "MS_TOPO_TIMEOUT": str(timeout),
        PARENT_VARIABLE: str(os.getpid()),  # it dies with this process
        SCHEDULES_VARIABLE: "1",
    }
    program = [str(_PACKAGE / "distributed/msrun_wrapper.py"), str(_PACKAGE / "__main__.py")]
    process = subprocess.Popen([sys.executable, *program], env={**os.environ, **settings})
    alone = 0
    while process.poll() is None and alone < MAX_ALONE:
        time.sleep(SCHEDULER_POLL_S)
        here = any(is_alive(folder, rank) for rank in range(size))
        alone = 0 if here else alone + 1
    process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
