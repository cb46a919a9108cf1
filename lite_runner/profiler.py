"""Turns on the recording of where the time of a process goes; see recorder.py.

One recorder at a time. Code with something to record checks `profiler.recorder`, which is None
unless recording is on: one variable read, a few times in a step of some milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner import progress

if TYPE_CHECKING:
    from lite_runner.recorder import Recorder

MOST_EVENTS = 200_000  # of a trace; the tables count what comes after them too
LAUNCHER_VARIABLE = "LITE_RUNNER_LAUNCHER"  # the recording of the launcher of ranks
recorder: Recorder | None = None
folder: Path | None = None  # of the traces, in a run with profile=true


def _process_start() -> float:
    """The start of this process as time.perf_counter() counts."""
    now = time.perf_counter()
    with Path("/proc/self/stat").open(encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - max(0.0, age)


def start(*, whole_process: bool = False, most_events: int = MOST_EVENTS) -> Recorder:
    """Record from now on, or with `whole_process` from the process's start, until `stop`."""
    from lite_runner.recorder import Recorder  # not for the runs that nobody records

    global recorder
    began = _process_start() if whole_process else None
    recorder = Recorder(began, most_events)
    if began is not None:
        recorder.slice("start", "start", began, time.perf_counter())
    progress.observe(recorder.phase)
    return recorder


def stop() -> Recorder | None:
    """Stop recording; the recording, None if there is none."""
    global recorder
    found, recorder = recorder, None
    progress.observe(None)
    if found is not None:
        found.ended = time.perf_counter()
    return found


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase, if a recorder is active."""
    if recorder is None:
        yield
        return
    with recorder.phase(name):
        yield
