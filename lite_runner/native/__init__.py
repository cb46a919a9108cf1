"""Native CPU kernels: the shared library that the set-up compiles from src/."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from lite_runner.errors import EnvironmentFault
from lite_runner.native import fingerprint
from lite_runner.records import dataclass
from lite_runner.system import environment

LIBRARY = Path(__file__).resolve().parent / "operators.so"
_POINTER, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {  # of src/operators.cc, reproducible.cc and training.cc
    "linear": [_POINTER, _POINTER, _NUMBER, _POINTER],
    "pack": [_POINTER, *[_NUMBER] * 7, _POINTER],
    "pack_blocks": [_POINTER, *[_NUMBER] * 4, _POINTER],
    "widen": [*[_POINTER] * 3, *[_NUMBER] * 5, _POINTER],
    "step": [_POINTER, _POINTER, _NUMBER, *[_POINTER] * 4],
    "choose": [ctypes.c_char_p],
    "amx": [ctypes.c_int],
    "read": [_POINTER, _NUMBER],
    "search": [_POINTER, _POINTER, *[_NUMBER] * 3, _POINTER, _NUMBER, _POINTER, _POINTER],
    "peers_bytes": [_NUMBER],
    "peers_open": [ctypes.c_int, *[_NUMBER] * 3, _POINTER],
    "peers_close": [_POINTER],
    "product": [_POINTER, _NUMBER],
    "trained_attention": [_POINTER, _NUMBER],
    "softmax": [_POINTER, _NUMBER, _NUMBER, _NUMBER, _FLOAT],
    "gated": [_POINTER, _POINTER, _NUMBER, _FLOAT, _POINTER],
    "gated_gradients": [*[_POINTER] * 3, _NUMBER, _FLOAT, _POINTER, _POINTER],
    "normed": [_POINTER, _NUMBER, _POINTER, _POINTER],
    "turned": [_POINTER, _NUMBER],
}
# Of the others: 0, or -1 without memory.
_RESULTS: dict[str, Any] = {
    "instructions": ctypes.c_char_p,
    "amx": ctypes.c_char_p,
    "read": _NUMBER,
    "peers_bytes": _NUMBER,
    "peers_open": _POINTER,
    "peers_close": None,
    "softmax": ctypes.c_double,
}


@dataclass(frozen=True)
class Unusable:
    """A reason not to use the kernels (continues "which ..."), and its remedy."""

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
    one would read out of bounds. So the fingerprint is checked before the library is loaded.
    """
    try:
        built = LIBRARY.read_bytes()
    except FileNotFoundError:
        return NOT_BUILT
    return None if fingerprint.sources().encode() in built else OF_OTHER_SOURCES


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises EnvironmentFault if it is `unusable`."""
    if reason := unusable():
        raise EnvironmentFault(
            f"this run needs this project's own operators, which {reason.why}", reason.remedy
        )
    found = ctypes.CDLL(str(LIBRARY))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(found, f"lite_runner_{name}")
        function.argtypes = arguments
        if name not in _RESULTS:
            function.errcheck = _enough_memory
    for name, result in _RESULTS.items():
        getattr(found, f"lite_runner_{name}").restype = result
    return found


def _enough_memory(code: int, *_: Any) -> int:
    """Check the code that a function of the library returned. Raises MemoryError for -1."""
    if code == -1:
        raise MemoryError("the native kernels' intermediate values")
    return code


def instructions() -> str:
    """The kernels in use: amx, avx512, avxvnni, avx2, dotprod (ARM) or portable, the best that this
    processor has, or reproducible."""
    name: bytes = library().lite_runner_instructions()
    return name.decode()


def amx() -> str:
    """Of the processor's tiles (AMX): "used", or why they are not; empty where it has none."""
    state: bytes = library().lite_runner_amx(0)
    return state.decode()


def choose_kernels(*, reproducible: bool) -> None:
    """Select the kernels with the same bits on every processor, or the fastest ones again."""
    if reproducible != (instructions() == "reproducible"):
        library().lite_runner_choose(b"reproducible" if reproducible else b"")


def set_threads(count: int | None) -> None:
    """Set the number of kernel threads; None: one per processor available to this process."""
    library().lite_runner_set_threads(count or environment.cores())
