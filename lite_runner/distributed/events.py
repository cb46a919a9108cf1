"""Events that a rank sends to its launcher: JSON lines over a Unix socket.

The launcher listens on a socket and names it in the environment; every rank connects once and
keeps the connection open. Nothing is sent to a rank. When the launcher exits, the connection closes
and the rank exits too (not during the rendezvous, when MindSpore holds the interpreter; but a rank
also dies with msrun). A rank whose connection closes without `done` or `error` has died.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lite_runner.errors import EXIT_FAILED
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from lite_runner.system.failure import Failure

SOCKET_VARIABLE = "LITE_RUNNER_EVENTS"  # path of the launcher's socket
FOLDER_VARIABLE = "LITE_RUNNER_FOLDER"  # of the launcher's run
MAX_LINE_BYTES = 1 << 22  # of one event
MAX_TEXT = 1 << 18  # characters of each text of an event; a longer one is sent in chunks
MET = "met the other ranks"  # the stage after the collectives' init; ends rendezvous_timeout

Kind = Literal["stage", "text", "title", "note", "error", "done"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line. Fields that an event does not use stay empty.

    stage: `text` says what the rank is doing, e.g. "load tiny_llama: 30%"; the first one is
           "started", sent on connecting.
    text:  `text` for standard output, verbatim (rank 0 only).
    title: `text` is a line for standard output if that is a terminal (rank 0 only).
    note:  `text` is a permanent line for standard error (rank 0 only).
    error: `exit_code`, `message`, `hint` and `traceback` of a Failure.
    done:  the rank's work is complete and its results are written; it exits with 0.
    """

    rank: int
    event: Kind
    text: str = ""
    exit_code: int = 0
    message: str = ""
    hint: str = ""
    traceback: str = ""

    def to_line(self) -> bytes:
        """ASCII JSON without empty fields, and a newline."""
        filled = {name: value for name, value in asdict(self).items() if value or name == "rank"}
        return json.dumps(filled).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Event:
        """Parse a line, with or without its newline. Raises ValueError."""
        raw = json.loads(line)
        types: dict[str, Any] = {"rank": int, "exit_code": int}
        if not isinstance(raw, dict) or not {"rank", "event"} <= raw.keys():
            raise ValueError(f"not an event: {line[:80]!r}")
        known = {field.name for field in fields(cls)}
        for name, value in raw.items():
            if name not in known or not isinstance(value, types.get(name, str)):
                raise ValueError(f"not an event: {line[:80]!r}")
        if raw["event"] not in Kind.__args__:  # type: ignore[attr-defined]
            raise ValueError(f"not an event: {line[:80]!r}")
        return cls(**raw)


class Sender:
    """A rank's end of the connection. Safe to use from any thread."""

    def __init__(self, path: Path, rank: int) -> None:
        """Connect; this process exits at once when the launcher closes its end."""
        self.rank = rank
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        threading.Thread(target=self._exit_with_launcher, name="launcher", daemon=True).start()
        self.stage("started")

    def stage(self, text: str) -> None:
        """The current work of this rank."""
        self._send(Event(rank=self.rank, event="stage", text=text))

    def text(self, text: str) -> None:
        """Text for standard output."""
        for start in range(0, len(text), MAX_TEXT):
            self._send(Event(rank=self.rank, event="text", text=text[start : start + MAX_TEXT]))

    def title(self, text: str) -> None:
        """A heading for the text that follows, shown on a terminal."""
        self._send(Event(rank=self.rank, event="title", text=text[:MAX_TEXT]))

    def note(self, text: str) -> None:
        """A line for the user."""
        self._send(Event(rank=self.rank, event="note", text=text[:MAX_TEXT]))

    def error(self, failure: Failure) -> None:
        """Why this rank fails; a long traceback loses its start."""
        self._send(
            Event(
                rank=self.rank,
                event="error",
                exit_code=failure.exit_code,
                message=failure.message[:MAX_TEXT],
                hint=failure.hint[:MAX_TEXT],
                traceback=failure.traceback[-MAX_TEXT:],
            )
        )

    def done(self) -> None:
        """This rank's work is complete."""
        self._send(Event(rank=self.rank, event="done"))

    def _send(self, event: Event) -> None:
        with self._lock:
            self._socket.sendall(event.to_line())

    def _exit_with_launcher(self) -> None:
        with suppress(OSError):  # a reset, where the launcher left events unread
            self._socket.recv(1)
        os._exit(EXIT_FAILED)


@cache
def connect(rank: int) -> Sender | None:
    """This process's connection to the launcher, always the same; None if it has no launcher."""
    path = os.environ.get(SOCKET_VARIABLE)
    return Sender(Path(path), rank) if path else None


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
