"""Ctrl-C and SIGTERM as exceptions in the main thread, even inside foreign libraries.

MindSpore installs its own SIGINT handler at every graph run, which sends SIGTERM. So SIGINT is
blocked in all threads, received by a waiting thread, and forwarded to the main thread as SIGUSR1,
which also interrupts blocking system calls.
"""

from __future__ import annotations

# The C part of the module signal: its enum wrappers would make `deferred`, which the scheduler
# enters several times per token, three times as slow.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_DEFERRED = int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGUSR1)


class Terminated(BaseException):
    """SIGTERM; like KeyboardInterrupt it is not an Exception."""


class CutShort(KeyboardInterrupt):
    """Ctrl-C during generation, after the partial results were written."""


_take: Callable[[], bool] | None = None  # who is offered Ctrl-C first


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
