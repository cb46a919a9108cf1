"""Where a rank's progress goes: to its launcher, or to the terminal if it has none."""

from __future__ import annotations

import sys

from lite_runner.distributed.events import Sender


class RankProgress:
    """The sink of a rank's progress: every rank sends its stages to the launcher, if there is one;
    only rank 0 prints for the user."""

    def __init__(self, rank: int, sender: Sender | None) -> None:
        self._prints = rank == 0
        self._sender = sender

    def stage(self, text: str) -> None:
        if self._sender is not None:
            self._sender.stage(text)

    def note(self, text: str) -> None:
        if not self._prints:
            return
        if self._sender is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._sender.note(text)

    def text(self, text: str) -> None:
        if not self._prints:
            return
        if self._sender is None:
            print(text, end="", flush=True)
        else:
            self._sender.text(text)

    def title(self, text: str) -> None:
        if not self._prints:
            return
        if self._sender is not None:
            self._sender.title(text)
        elif sys.stdout.isatty():
            print(text, flush=True)
