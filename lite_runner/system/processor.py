"""The processor: its name, and what it can do."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from lite_runner.system import cgroups

_INFO = Path("/proc/cpuinfo")
# Those that matter to products of matrices.
_FEATURES = re.compile(r"avx2|avx512f|avx512_vnni|avx_vnni|amx_int8|amx_bf16|asimddp|i8mm|sve")


def name() -> str:
    """Its model, or the kind of machine where the system names none, as on ARM."""
    return _field("model name") or platform.machine()


def cores(processes: int = 1) -> int:
    """Cores that this process may use: of its affinity, whole ones of its cgroups' CPU quota; or
    how many each of some `processes` that share them, at least one."""
    allowed = len(os.sched_getaffinity(0))
    quota = cgroups.cpu_quota()
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
