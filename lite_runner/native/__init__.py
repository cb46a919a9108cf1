"""Native CPU kernels: the shared library that the set-up compiles from src/."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from lite_runner.errors import EnvironmentFault
from lite_runner.native import fingerprint
from lite_runner.records import dataclass

LIBRARY = Path(__file__).resolve().parent / "operators.so"


@dataclass(frozen=True)
class Unusable:
    """Why the kernels cannot be used (continues "which ..."), and the remedy."""

    why: str
    remedy: str


NOT_BUILT = Unusable(
    "were not built: the set-up found no C++ compiler",
    "install a C++ compiler (g++ or clang++), then set up again: make run, or pip install .",
)
OF_OTHER_SOURCES = Unusable(
    "were built from other sources than those beside them",
    "build them again: python setup.py build_ext --inplace, or pip install .",
)


def unusable() -> Unusable | None:
    """None if the library exists and was built from the sources beside it.

    Library and sources share the layout of packed layers, which the library cannot check: a stale
    one would read out of bounds. So the fingerprint is looked up before the library is loaded.
    """
    try:
        built = LIBRARY.read_bytes()
    except FileNotFoundError:
        return NOT_BUILT
    return None if fingerprint.sources().encode() in built else OF_OTHER_SOURCES


def check_usable(what: str) -> None:
    """Raise EnvironmentFault unless `what` can use the kernels."""
    if fault := unusable():
        raise EnvironmentFault(
            f"{what} needs this project's own operators, which {fault.why}", fault.remedy
        )


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises EnvironmentFault if it is `unusable`.

    MindSpore opens the same file, so both share one thread pool.
    """
    check_usable("this run")
    found = ctypes.CDLL(str(LIBRARY))
    found.lite_runner_instructions.restype = ctypes.c_char_p
    return found


def instructions() -> str:
    """Instruction set the kernels selected for this processor: avx512, avx2 or portable."""
    name: bytes = library().lite_runner_instructions()
    return name.decode()


def set_threads(count: int | None) -> None:
    """Set the number of kernel threads; None: one per processor available to this process."""
    library().lite_runner_set_threads(count or len(os.sched_getaffinity(0)))
