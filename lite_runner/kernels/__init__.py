"""Our own operators for CPU: the library that the set-up compiled from src/."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent / "operators.so"


@cache
def library() -> ctypes.CDLL | None:
    """The operators, or None where there was no compiler to make them.

    MindSpore opens the same file, and so shares its threads and their number.
    """
    if not LIBRARY.is_file():
        return None
    found = ctypes.CDLL(str(LIBRARY))
    found.lite_runner_instructions.restype = ctypes.c_char_p
    return found


def instructions() -> str:
    """Those that the operators chose for this processor: avx512, avx2 or portable."""
    found = library()
    assert found is not None
    name: bytes = found.lite_runner_instructions()
    return name.decode()


def set_threads(count: int | None) -> None:
    """How many threads share the work of an operator; None: as many as there are processors for
    this process."""
    found = library()
    assert found is not None
    found.lite_runner_set_threads(count or len(os.sched_getaffinity(0)))
