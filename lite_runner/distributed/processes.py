"""Finding and ending all processes of a job, also those whose parent has ended."""

from __future__ import annotations

import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lite_runner import progress
from lite_runner.distributed.events import SOCKET_VARIABLE

PATIENCE_S = 8.0  # for the kernel to end what was killed


def members(events: Path) -> list[psutil.Process]:
    """Every process that lives and was started with `events` as its launcher's socket."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(SOCKET_VARIABLE) == str(events)
            if ours and not has_ended(process):
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or gone meanwhile
            continue
    return found


def scheduler_of(msrun: int) -> psutil.Process | None:
    """The scheduler that the process `msrun` has started, if it has one."""
    try:
        for child in psutil.Process(msrun).children():
            if child.environ().get("MS_ROLE") == "MS_SCHED":
                return child
    except psutil.Error:  # gone meanwhile
        pass
    return None


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def end_all(events: Path) -> None:
    """Kill the processes of a job until none is left; a note names those that do not end.

    SIGKILL at once: a rank in a collective waits for its peers and would not end otherwise.
    """
    deadline = time.monotonic() + PATIENCE_S
    while left := members(events):
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=0.1)
        if time.monotonic() > deadline:
            ids = ", ".join(str(process.pid) for process in left)
            progress.note(f"processes that do not end though they were killed: {ids}")
            return
