"""What a benchmarked process says of itself: its age, its memory, its one line of JSON.

Standard library only, so that every engine's environment can import it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measurement:
    """One process, one batch. Speeds are of a second pass, warm; the first token is cold."""

    engine: str
    batch: int
    prompt_tokens: int  # of one row
    new_tokens: int  # of one row
    first_token_s: float  # from the start of the process, imports and load included
    load_s: float  # without compiling; ours imports MindSpore in it
    prefill_tok_s: float  # all rows together, as is decode
    decode_tok_s: float
    peak_rss_mib: float
    disk_mib: float  # of the files that are loaded
    token_ids: list[list[int]]  # generated, a list a row

    def print(self) -> None:
        print(json.dumps(asdict(self)), flush=True)


def seconds_since_start() -> float:
    """Age of this process in seconds, to 10 ms.

    Both clocks count from boot. psutil's create_time adds the boot time in whole seconds,
    which shifts the result by up to one.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def peak_rss_mib() -> float:
    """Largest resident set of this process so far, in MiB, file pages it mapped included, and that
    of the processes that it has started and that still run: an engine may be one.

    Not getrusage: its maximum survives exec, so a child would report its parent's.
    """
    children = [
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return sum(_peak_mib(process) for process in ("self", *children))


def mebibytes(files: Iterable[Path]) -> float:
    """Size on disk of files and of folders with all that is in them."""
    size = 0.0
    for path in files:
        size += mebibytes(path.iterdir()) if path.is_dir() else path.stat().st_size / 2**20
    return size


def _peak_mib(process: str) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
