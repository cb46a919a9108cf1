"""This process's cgroups, of version 1 and 2: where their files are, and the CPU quota in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def folders(controller: str = "") -> list[Path]:
    """This process's cgroup and its parents, of a `controller` of version 1, or of version 2; in a
    container possibly only the mount."""
    mount = _MOUNT / controller
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:
        return [mount]
    own = next((path for _, names, path in lines if controller in names.split(",")), "/")
    inner = mount / own.lstrip("/")
    return [inner, *(above for above in inner.parents if above.is_relative_to(mount))]


def number(file: Path, key: str = "") -> int | None:
    """The number in a file, or of a `key` in it; None if there is none, e.g. "max"."""
    try:
        text = file.read_text()
        if not key:
            return int(text)
        return next(int(line.split()[1]) for line in text.splitlines() if line.split()[0] == key)
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def cpu_quota() -> float | None:
    """CPU quota of the cgroups in CPUs, e.g. 1.5; None: no limit."""
    return min(_quotas(), default=None)


def _quotas() -> Iterator[float]:
    for folder in folders():
        try:
            quota, period = map(int, (folder / "cpu.max").read_text().split())
        except (OSError, ValueError):  # none, or "max 100000"
            continue
        yield quota / period
    for folder in folders("cpu"):
        allowed, time = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
        if allowed and allowed > 0 and time:  # -1: no limit
            yield allowed / time
