"""Our own operators for CPU: the library that the set-up compiled from src/."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lite_runner.errors import EnvironmentFault
from lite_runner.native import fingerprint

LIBRARY = Path(__file__).resolve().parent / "operators.so"


@dataclass(frozen=True)
class Unusable:
    """Why the operators cannot be used, behind "they" or "which", and what would help."""

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
    """None where the library is there and was built from the sources beside it.

    They say together how the blocks of layers are laid out, which the library cannot check: one of
    other sources would read past their ends. So it is searched, and loaded only where it fits.
    """
    try:
        built = LIBRARY.read_bytes()
    except FileNotFoundError:
        return NOT_BUILT
    return None if fingerprint.sources().encode() in built else OF_OTHER_SOURCES


def check_usable(what: str) -> None:
    """That `what` has the operators which it needs, else an EnvironmentFault."""
    if fault := unusable():
        raise EnvironmentFault(
            f"{what} needs this project's own operators, which {fault.why}", fault.remedy
        )


@cache
def library() -> ctypes.CDLL:
    """The operators. Raises EnvironmentFault where they are `unusable`.

    MindSpore opens the same file, and so shares its threads and their number.
    """
    check_usable("this run")
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
