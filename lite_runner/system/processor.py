"""The processor, and how much of it this process may use: its cgroups, of version 1 and 2."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

_INFO = Path("/proc/cpuinfo")
_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# Those that matter to products of matrices.
_FEATURES = re.compile(r"avx2|avx512f|avx512_vnni|avx_vnni|amx_int8|amx_bf16|asimddp|i8mm|sve")


def name() -> str:
    """Its model, or the kind of machine where the system names none, as on ARM."""
    return _field("model name") or platform.machine()


def cores(processes: int = 1) -> int:
    """Cores that this process may use: of its affinity, whole ones of its cgroups' CPU quota; or
    how many each of some `processes` that share them, at least one."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    # More threads than the quota are all stopped for the rest of each period once it is used up.
    return max(1, (allowed if quota is None else min(allowed, int(quota))) // processes)


def features() -> list[str]:
    """Its vector and matrix instructions, as Linux calls them."""
    found = _field("flags") or _field("Features")
    return [flag for flag in found.split() if _FEATURES.fullmatch(flag)]


def _field(key: str) -> str:
    """The first value of a key of /proc/cpuinfo; "" where there is none."""
    try:
        lines = _INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":")[::2] for line in lines)
    return next((value.strip() for one, value in pairs if one.strip() == key), "")


def cgroups(controller: str = "") -> list[Path]:
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


def number_in(file: Path, key: str = "") -> int | None:
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
    for folder in cgroups():
        try:
            quota, period = map(int, (folder / "cpu.max").read_text().split())
        except (OSError, ValueError):  # none, or "max 100000"
            continue
        yield quota / period
    for folder in cgroups("cpu"):
        allowed, time = (
            number_in(folder / "cpu.cfs_quota_us"),
            number_in(folder / "cpu.cfs_period_us"),
        )
        if allowed and allowed > 0 and time:  # -1: no limit
            yield allowed / time
