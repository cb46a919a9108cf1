"""Finding and killing all processes of a job, orphans included."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lite_runner import progress
from lite_runner.distributed.events import SOCKET_VARIABLE

KILL_TIMEOUT_S = 8.0


def job_processes(events: Path) -> list[psutil.Process]:
    """Every live process of the job whose launcher listens on the socket `events`."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(SOCKET_VARIABLE) == str(events)
            if ours and not has_ended(process):
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or already gone
            continue
    return found


def scheduler_of(msrun: int) -> psutil.Process | None:
    """The scheduler that the process `msrun` has started; None if it has none."""
    try:
        for child in psutil.Process(msrun).children():
            if child.environ().get("MS_ROLE") == "MS_SCHED":
                return child
    except psutil.Error:  # already gone
        pass
    return None


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone or a zombie."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def exit_code(pid: int) -> int | None:
    """The exit code of a zombie of this user, as subprocess has it; None if it is none.

    Its parent alone can wait for it; the kernel shows the status to others, too (proc(5)).
    """
    try:
        # The name of the program, in parentheses, may hold anything.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(rest[-1])) if state == "Z" else None
    except (OSError, ValueError):
        return None


def kill_all(events: Path) -> None:
    """Kill the processes of a job until none is left; a note names those that survive.

    SIGKILL at once: a rank inside a collective handles no other signal.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := job_processes(events):
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
