"""How ranks stop before the same step of their generation on Ctrl-C.

Ranks that share a replica of a model compute every step together: if one stopped by itself, the
others would wait for it for good. So Ctrl-C only sets a flag in shared memory, the board of all
ranks of the machine. When the first rank of a replica is about to begin its step k and sees the
flag, it writes k + 1 beside it, and computes step k. The others need that rank's part of step k to
finish theirs, so all of them see the number before they begin step k + 1, and there all stop. This
costs a read of memory before each step. Replicas have no steps in common: each stops by itself.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from lite_runner.config.ranks import Ranks

BOARD = "board"  # the file's name, beside the launcher's socket or in the ranks' meeting place
STOP_S = 15.0  # from Ctrl-C to the end of all ranks, results written; then they are ended
_BYTES = 8  # of a number
_BEGAN, _ASKED, _STOPS = range(3)  # places on the board; from the last on, one for each replica


class Board:
    """A file mapped into the memory of a machine's ranks, and of what has started them."""

    def __init__(self, path: Path) -> None:
        """Look at the board that is at `path`."""
        with path.open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 0)
        # Aligned, so that each number is read and written at once.
        self._numbers = memoryview(shared).cast("q")
        self.taken = False  # whether this process has been asked by Ctrl-C

    @classmethod
    def create(cls, path: Path, ranks: int) -> Board:
        """Put an empty one for so many ranks there; whoever still looks at an old one keeps it."""
        path.unlink(missing_ok=True)
        path.write_bytes(bytes(_BYTES * (_STOPS + ranks)))
        return cls(path)

    @property
    def began(self) -> bool:
        """Whether a rank has begun to generate."""
        return bool(self._numbers[_BEGAN])

    @property
    def asked(self) -> bool:
        """Whether the ranks are to stop."""
        return bool(self._numbers[_ASKED])

    def take(self) -> bool:
        """Ctrl-C in this process: ask the ranks to stop. False where it is not for them: before any
        has begun, and for the second time."""
        if self.taken or not self.began:
            return False
        self.taken = True
        self._numbers[_ASKED] = 1
        return True

    def begin(self) -> None:
        """Say that a rank begins to generate."""
        self._numbers[_BEGAN] = 1

    def stop_of(self, replica: int) -> int:
        """The step before which a replica stops; 0: none yet."""
        return self._numbers[_STOPS + replica]

    def set_stop(self, replica: int, step: int) -> None:
        """Stop a replica before its `step`, counted from 1."""
        self._numbers[_STOPS + replica] = step


class CommonStop:
    """The step before which a rank stops, the same for all that share its replica."""

    def __init__(self, board: Board | None, ranks: Ranks) -> None:
        """Without a `board`, as on several machines, nowhere."""
        self._board = board
        self._replica = ranks.data_index
        self._leads = ranks.tensor_index == 0
        self._ahead = 1 if ranks.tensor > 1 else 0  # steps that the others may have begun already
        self._step = 0

    def here(self) -> bool:
        """Whether generation ends now; to be asked once before every step.

        No rank of the replica finishes a step without the others: it needs the logits of a forward
        pass.
        """
        board = self._board
        if board is None:
            return False
        self._step += 1
        if self._step == 1:
            board.begin()
        if self._leads and board.asked and not board.stop_of(self._replica):
            board.set_stop(self._replica, self._step + self._ahead)
        return 0 < board.stop_of(self._replica) <= self._step
