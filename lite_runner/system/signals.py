"""Ctrl-C and SIGTERM as exceptions in the main thread, even inside foreign libraries.

At every graph run MindSpore installs its own SIGINT handler, which sends SIGTERM to the process.
Where possible `leave_interrupts` keeps it from that: there is no setting for it, and SIGINT cannot
be blocked in foreign threads, so the `sigaction` import of the library that registers the handler,
its only use, is patched to a no-op. Besides, SIGINT is blocked in all threads, received by a
waiting thread, and forwarded to the main thread as SIGUSR1, which also interrupts blocking system
calls.
"""

from __future__ import annotations

# The C part of the module signal: its enum wrappers would make `deferred`, which the scheduler
# enters several times per token, three times as slow.
import _signal  # type: ignore[import-not-found]
import ctypes
import mmap
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_DEFERRED = int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGUSR1)
_take: Callable[[], bool] | None = None  # asked first on Ctrl-C
LIBRARY = "lib/libmindspore_common.so"  # of the package; defines RegisterGlobalSignalHandler
_DYNAMIC_SEGMENT = 2  # numbers of the ELF format, for 64 bits
_STRINGS, _SYMBOLS = 5, 6
_RELOCATIONS = ((23, 2), (7, 8))  # (address, size) of those for functions, and of the others


class Terminated(BaseException):
    """SIGTERM; like KeyboardInterrupt it is not an Exception."""


class CutShort(KeyboardInterrupt):
    """Ctrl-C during generation, after the partial results were written."""


@contextmanager
def handled() -> Iterator[None]:
    """Context in which Ctrl-C raises KeyboardInterrupt and SIGTERM raises Terminated.

    Enter it before starting any thread, NumPy's included: threads inherit the signal mask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        # Where a shell's background ignores it, setting it back to that would drop one that waits.
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, _terminate),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signal.default_int_handler),
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    stopping = threading.Event()
    waiter = threading.Thread(target=_pass_on, args=(stopping,), name="ctrl-c", daemon=True)
    waiter.start()
    try:
        yield
    finally:
        stopping.set()
        assert waiter.ident is not None
        signal.pthread_kill(waiter.ident, signal.SIGINT)
        waiter.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def offered(take: Callable[[], bool]) -> Iterator[None]:
    """Within `handled`: call `take` in another thread at each Ctrl-C; KeyboardInterrupt is raised
    only if it returns False.

    Also works while the main thread is in foreign code.
    """
    global _take
    before, _take = _take, take
    try:
        yield
    finally:
        _take = before


@contextmanager
def deferred() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM; the first of them is raised at the end.

    For foreign code that swallows exceptions or is broken by them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []

    def wait(number: int, _frame: FrameType | None) -> None:
        waiting.append(number)

    before = [(number, _signal.signal(number, wait)) for number in _DEFERRED]
    try:
        yield
    finally:
        for number, handler in before:
            _signal.signal(number, handler)
        if waiting:
            handler = dict(before)[waiting[0]]
            if callable(handler):
                handler(waiting[0], None)  # SIGINT itself may be blocked
            else:
                signal.raise_signal(waiting[0])


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


def _pass_on(stopping: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None
    while True:
        signal.sigwait({signal.SIGINT})
        if stopping.is_set():
            return
        if _take is None or not _take():
            signal.pthread_kill(main, signal.SIGUSR1)


def leave_interrupts(package: Path) -> bool:
    """Keep the imported MindSpore at `package` from handling SIGINT; whether that succeeded.
    Idempotent and thread-safe."""
    libc = ctypes.CDLL(None)
    # sched_yield returns 0, which is success.
    real, nothing = _address(libc.sigaction), _address(libc.sched_yield)
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
