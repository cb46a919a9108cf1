"""Ctrl-C for ranks: all stop before the same step of their generation.

Ranks of a tensor-parallel replica compute every step together: if one stopped by itself, the others
would wait for it forever. So Ctrl-C only sets a flag in memory that the ranks of the machine share.
When the first rank of a replica is about to begin its step k and sees the flag, it writes k + 1 to
that memory and computes step k. The others need its part of step k to finish theirs, so all of them
see the number before they begin step k + 1, and stop there. The cost is one read of memory per
step. Replicas have no steps in common: each stops by itself.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from lite_runner.config.sections import Ranks
from lite_runner.errors import EXIT_INTERRUPTED
from lite_runner.system.signals import offered

STOP_FILE = "stop"  # beside the launcher's socket, or in the folder of the ranks' lock files
STOP_S = 15.0  # from Ctrl-C until all ranks have written their results; then they are killed
_BYTES = 8  # of a number
_GENERATING, _REQUESTED, _STEPS = range(3)  # indices; from the last on, one for each replica


class StopFlags:
    """A file mapped into the memory of a machine's ranks and of the process that started them."""

    def __init__(self, path: Path) -> None:
        """Map the file at `path`."""
        with path.open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 0)
        # Aligned, so that reads and writes of a number are atomic.
        self._numbers = memoryview(shared).cast("q")
        self.requested_here = False  # Ctrl-C reached this process

    @classmethod
    def create(cls, path: Path, ranks: int) -> StopFlags:
        """Create the file for so many ranks; a process that has mapped an old one keeps that."""
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(_BYTES * (_STEPS + ranks)))
        return cls(path)

    @property
    def generating(self) -> bool:
        """True once a rank has begun to generate."""
        return bool(self._numbers[_GENERATING])

    @property
    def stop_requested(self) -> bool:
        """True once the ranks are to stop."""
        return bool(self._numbers[_REQUESTED])

    def request_stop(self) -> bool:
        """Ctrl-C in this process: ask the ranks to stop. False if it must end the process instead:
        before any rank generates, and the second time."""
        if self.requested_here or not self.generating:
            return False
        self.requested_here = True
        self._numbers[_REQUESTED] = 1
        return True

    def set_generating(self) -> None:
        """A rank begins to generate."""
        self._numbers[_GENERATING] = 1

    def stop_step(self, replica: int) -> int:
        """The step before which a replica stops, counted from 1; 0: none yet."""
        return self._numbers[_STEPS + replica]

    def set_stop_step(self, replica: int, step: int) -> None:
        """Stop a replica before its `step`, counted from 1."""
        self._numbers[_STEPS + replica] = step


class StopCondition:
    """The step before which a rank stops, the same for all ranks of its replica."""

    def __init__(self, flags: StopFlags | None, ranks: Ranks) -> None:
        """`flags` None, as on several machines: it never stops."""
        self._flags = flags
        self._replica = ranks.data_index
        self._leads = ranks.tensor_index == 0
        self._ahead = 1 if ranks.tensor > 1 else 0  # steps that the others may have begun already
        self._step = 0

    def reached(self) -> bool:
        """True where generation ends now; call it once before every step.

        No rank of the replica finishes a step without the others: it needs the logits of a forward
        pass.
        """
        flags = self._flags
        if flags is None:
            return False
        self._step += 1
        if self._step == 1:
            flags.set_generating()
        if self._leads and flags.stop_requested and not flags.stop_step(self._replica):
            flags.set_stop_step(self._replica, self._step + self._ahead)
        return 0 < flags.stop_step(self._replica) <= self._step


def stop_on_ctrl_c(flags: StopFlags | None) -> AbstractContextManager[None]:
    """Context in which the first Ctrl-C asks generating ranks to stop; others interrupt."""
    return nullcontext() if flags is None else offered(flags.request_stop)


@contextmanager
def stop_or_exit_on_ctrl_c(flags: StopFlags | None) -> Iterator[None]:
    """As `stop_on_ctrl_c`, for a rank that no launcher supervises: a second Ctrl-C, or STOP_S
    without an end, exits the process at once."""
    if flags is None:
        yield
        return
    timer = threading.Timer(STOP_S, _exit, (f": the ranks did not stop within {STOP_S:.0f} s",))

    def request() -> bool:
        if flags.request_stop():
            timer.start()
        elif flags.requested_here:
            _exit()
        return flags.requested_here

    with offered(request):
        try:
            yield
        finally:
            timer.cancel()
            if timer.ident is not None:
                timer.join()  # MindSpore's finalization crashes beside a running thread


def _exit(reason: str = "") -> NoReturn:
    print(f"interrupted{reason}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_INTERRUPTED)
