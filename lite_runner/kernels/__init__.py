"""Our own operators for CPU: the library that the set-up compiled from src/."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from lite_runner.errors import EnvironmentFault

LIBRARY = Path(__file__).resolve().parent / "operators.so"


def check_built(what: str) -> None:
    """That `what` has the operators which it needs, else an EnvironmentFault."""
    if not LIBRARY.is_file():
        raise EnvironmentFault(
            f"{what} needs this project's own operators, which were not built: no {LIBRARY.name}",
            "install a C++ compiler, then set up again: make run, or pip install .",
        )


@cache
def library() -> ctypes.CDLL:
    """The operators. Raises EnvironmentFault where there was no compiler to make them.

    MindSpore opens the same file, and so shares its threads and their number.
    """
    check_built("this run")
    found = ctypes.CDLL(str(LIBRARY))
    found.lite_runner_instructions.restype = ctypes.c_char_p
    return found


def instructions() -> str:
    """Those that the operators chose for this processor: avx512, avx2 or portable."""
    name: bytes = library().lite_runner_instructions()
    return name.decode()


def set_threads(count: int | None) -> None:
    """How many threads share the work of an operator; None: as many as there are processors for
    this process."""
    library().lite_runner_set_threads(count or len(os.sched_getaffinity(0)))
