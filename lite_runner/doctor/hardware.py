"""What the machine gives: processor, Ascend devices, memory, disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from lite_runner.doctor import child
from lite_runner.doctor.check import Finding
from lite_runner.errors import EnvironmentFault
from lite_runner.output.report import PROBE_BYTES
from lite_runner.sizing.need import PROCESS, Memory, readable, shortage
from lite_runner.system import environment, memory, processor

ASCEND_S = 180.0  # seconds until a device must have answered; the first use of one takes its time
SMALL_DISK = 10**9  # bytes; less is little for a checkpoint


def cpu() -> Finding:
    """The processor: the cores that this process may use, and its features."""
    count = f"{processor.cores()} of {os.cpu_count()} cores"
    features = " ".join(processor.features()) or "no vector instructions that matter here"
    return Finding("ok", f"{processor.name()}, {count}, {features}")


def ascend() -> Finding:
    """The Ascend devices, if there are any."""
    count = environment.ascend_devices()
    if not count:
        return Finding("ok", "none: runs on the CPU")
    return Finding("ok", f"{count} x {child.ask('ascend', ASCEND_S)}")


def main_memory() -> Finding:
    """What a process may take, against what MindSpore alone does: of the machine, the container
    (cgroup), and by ulimit -v."""
    if (lacking := shortage(Memory(0, 0, process=PROCESS))) is not None:
        remedy = "ulimit -v unlimited, a larger limit of the container, or fewer other processes"
        return Finding("fail", f"MindSpore alone {lacking}", remedy=remedy)
    free, whole = memory.free_memory(), int(psutil.virtual_memory().total)
    found = f"{readable(free)} free for this process, of the machine's {readable(whole)}"
    left = memory.free_addresses()
    limit = "" if left is None else f"; ulimit -v leaves {readable(left)} of address space"
    return Finding("ok", found + limit)


def output_disk(output_dir: Path) -> Finding:
    """Whether a run can make its folder below `output_dir`; nothing is made."""
    base = output_dir.expanduser().absolute()
    finding = _disk(base, "output_dir=FOLDER, one that can be written")
    latest = base / "latest"
    if finding.status != "fail" and latest.is_dir() and not latest.is_symlink():
        found = f"{latest}: a folder stands where the link to the newest run is to be"
        return Finding("fail", found, remedy=f"mv {latest} {latest}-old")
    return finding


def cache_disk(cache_dir: Path) -> Finding:
    """Whether what is fetched and compiled can be kept; what is there can be read without."""
    finding = _disk(
        cache_dir.absolute(), "export LITE_RUNNER_CACHE=FOLDER, one that can be written"
    )
    return Finding(
        "warn" if finding.status == "fail" else finding.status, finding.found, remedy=finding.remedy
    )


def _disk(folder: Path, remedy: str) -> Finding:
    try:
        place = _standing(folder)
        with tempfile.TemporaryFile(dir=place) as file:  # permission and space show only then
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        found = f"{folder}: cannot be written: {error.strerror or error}"
        return Finding("fail", found, remedy=remedy)
    found = f"{folder}: {readable(free)} free"
    if free < SMALL_DISK:
        return Finding("warn", found, readable(SMALL_DISK), f"free some space, or {remedy}")
    return Finding("ok", found)


def _standing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists: there it would be made."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            raise OSError(f"{place} is a link to {place.readlink()}, which does not exist")
        if place.exists():
            if not place.is_dir():
                raise OSError(f"{place} is a file")
            return place
    raise EnvironmentFault(f"{folder}: not even / exists")
