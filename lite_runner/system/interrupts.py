"""Keeps Python's SIGINT handler while MindSpore computes.

At every graph run MindSpore installs its own handler, which turns SIGINT into a SIGTERM to the
process: no KeyboardInterrupt, and the calling program is killed. There is no setting to disable it,
and SIGINT cannot be blocked in foreign threads. So the `sigaction` import of the library that
registers the handler, its only use, is patched to a no-op.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

LIBRARY = "lib/libmindspore_common.so"  # of the package; defines RegisterGlobalSignalHandler
_DYNAMIC_SEGMENT = 2  # numbers of the ELF format, for 64 bits
_STRINGS, _SYMBOLS = 5, 6
_RELOCATIONS = ((23, 2), (7, 8))  # (address, size) of those for functions, and of the others


def leave_interrupts(package: Path) -> bool:
    """Keep the imported MindSpore at `package` from handling SIGINT; whether that succeeded.
    Idempotent and thread-safe."""
    libc = ctypes.CDLL(None)
    real, nothing = _address(libc.sigaction), _address(libc.sched_yield)  # which answers 0: done
    library = package.resolve() / LIBRARY
    found = [ctypes.c_uint64.from_address(one) for one in _imports(library, b"sigaction")]
    if not found or any(one.value not in (real, nothing) for one in found):
        return False
    for slot in found:
        page = ctypes.addressof(slot) & -mmap.PAGESIZE
        if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
            return False
        slot.value = nothing
        libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ)
    return True


def _imports(library: Path, name: bytes) -> Iterator[int]:
    """Addresses of a loaded library's relocation entries for the function `name`."""
    base = _base(library)
    if base is None:
        return
    (headers,), (size, count) = _read("<Q", base + 32), _read("<HH", base + 54)
    dynamic: dict[int, int] = {}
    for index in range(count):
        kind, _, _, address, _, _, length, _ = _read("<IIQQQQQQ", base + headers + index * size)
        if kind == _DYNAMIC_SEGMENT:
            pairs = ctypes.string_at(base + address, length)
            dynamic = dict(struct.iter_unpack("<QQ", pairs))
    if not dynamic.keys() >= {_STRINGS, _SYMBOLS}:
        return
    # glibc relocates them to addresses at load time, other libcs keep offsets.
    at = {tag: value if value >= base else base + value for tag, value in dynamic.items()}
    for table, length in _RELOCATIONS:
        if table not in dynamic:
            continue
        entries = ctypes.string_at(at[table], dynamic[length])
        for offset, info, _ in struct.iter_unpack("<QQq", entries):
            symbol = info >> 32
            if symbol:
                (text,) = _read("<I", at[_SYMBOLS] + 24 * symbol)
                if ctypes.string_at(at[_STRINGS] + text) == name:
                    yield base + offset


def _base(library: Path) -> int | None:
    """Load address of a library."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *path = line.split(maxsplit=5)
        if path == [str(library)] and int(offset, 16) == 0:
            return int(span.split("-")[0], 16)
    return None


def _read(layout: str, address: int) -> tuple[int, ...]:
    return struct.unpack(layout, ctypes.string_at(address, struct.calcsize(layout)))


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
