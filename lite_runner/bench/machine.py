"""The machine that is measured on, and what else it does meanwhile."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from lite_runner.bench.report import Machine
from lite_runner.system import processor


def this_machine() -> Machine:
    """The processor, and what this process may use of it."""
    import psutil  # type: ignore[import-untyped]

    return Machine(
        processor=processor.name(),
        cores=processor.cores(),
        memory_mib=psutil.virtual_memory().total >> 20,
    )


class Others:
    """What other programs than this one and its children take of the processor."""

    def __init__(self) -> None:
        self._started, self._before = time.monotonic(), _foreign_seconds()

    def busy_cores(self) -> float:
        """Cores that they have kept busy since, on average; children count once they have ended."""
        seconds = time.monotonic() - self._started
        return max(0.0, _foreign_seconds() - self._before) / max(seconds, 1e-9)


def _foreign_seconds() -> float:
    """CPU seconds since boot that were neither idle nor spent by this process and its children."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # less idle and iowait
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in usages)
