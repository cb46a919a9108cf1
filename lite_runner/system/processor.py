"""The processor: its name, and what it can do."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

_INFO = Path("/proc/cpuinfo")
# Those that matter to products of matrices.
_FEATURES = re.compile(r"avx2|avx512f|avx512_vnni|avx_vnni|amx_int8|amx_bf16|asimddp|i8mm|sve")


def name() -> str:
    """Its model, or the kind of machine where the system names none, as on ARM."""
    return _field("model name") or platform.machine()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


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
