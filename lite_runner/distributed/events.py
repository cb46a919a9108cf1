"""Events that a rank sends to its launcher, and the launcher's end: JSON lines over a Unix socket.

The launcher listens on a socket and names it in the environment; every rank connects once and
keeps the connection open. Nothing is sent to a rank. When the launcher exits, the connection closes
and the rank exits too (not during the rendezvous, when MindSpore holds the interpreter; but a rank
also dies with msrun). A rank whose connection closes without `done` or `error` has died.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lite_runner import progress
from lite_runner.config.parallel import SOCKET_VARIABLE
from lite_runner.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EnvironmentFault,
    RunnerError,
)
from lite_runner.records import dataclass
from lite_runner.system import memory
from lite_runner.system.signals import Terminated


@dataclass(frozen=True)
class Failure:
    """Exit code, message and hint as of a RunnerError; `traceback` only of unexpected errors."""

    exit_code: int
    message: str
    hint: str = ""
    traceback: str = ""


def failure_of(error: BaseException) -> Failure:
    """The failure that `error` is; out of memory is an EnvironmentFault, whatever raised it."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(EXIT_INTERRUPTED, "interrupted")
    if isinstance(error, Terminated):
        return Failure(EXIT_TERMINATED, "terminated")
    known = error if isinstance(error, RunnerError) else memory.shortage_error(error)
    if known is not None:
        return Failure(known.exit_code, known.message, known.hint)
    trace = "".join(traceback.format_exception(error))
    return Failure(EXIT_FAILED, f"{type(error).__name__}: {error}", traceback=trace)


FOLDER_VARIABLE = "LITE_RUNNER_FOLDER"  # of the launcher's run
MAX_LINE_BYTES = 1 << 22  # of one event
MAX_TEXT = 1 << 18  # characters of each text of an event; a longer one is sent in chunks
MET = "joined the other ranks"  # the stage after the collectives' init; ends rendezvous_timeout

_CREDENTIALS = struct.Struct("3i")  # process, user and group id of the other end
_READ_BYTES = 1 << 16

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
        """Report why this rank fails; a long traceback loses its start."""
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


@dataclass
class RankState:
    """The state of one rank, from its events so far."""

    pid: int | None = None  # None: not started yet
    stage: str = "starting"
    met: bool = False  # it has joined the other ranks
    done: bool = False
    last_event_at: float = 0.0  # time.monotonic()


class _Connection:
    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.rank: int | None = None  # None until its first event
        self.pending = b""
        credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid = int(_CREDENTIALS.unpack(credentials)[0])


class RankMonitor:
    """Listens on the Unix socket `events`, in a folder that only this user may enter."""

    def __init__(self, events: Path, ranks: range) -> None:
        self.ranks = {rank: RankState(last_event_at=time.monotonic()) for rank in ranks}
        self.failure: Event | None = None  # of the first rank that failed; no message: it died
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(events))
        except OSError as error:  # the path is longer than the 107 bytes of a socket's
            self.close()
            raise EnvironmentFault(
                f"cannot listen on {events}: {error.strerror or error}",
                "name a folder with a short path: TMPDIR=/tmp",
            ) from None
        self._listener.listen(2 * len(ranks))
        self._selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Close the connections; ranks that are still running then exit."""
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.data, _Connection):
                key.data.stream.close()
        self._selector.close()
        self._listener.close()

    @property
    def all_done(self) -> bool:
        return all(state.done for state in self.ranks.values())

    @property
    def all_met(self) -> bool:
        return all(state.met or state.done for state in self.ranks.values())

    def rank_of(self, pid: int) -> int | None:
        """The rank of a process; None if unknown."""
        return next((rank for rank, state in self.ranks.items() if state.pid == pid), None)

    def slowest(self) -> int:
        """The rank that has been silent longest, of those that the others wait for."""
        working = {rank: state for rank, state in self.ranks.items() if not state.done}
        late = {rank: state for rank, state in working.items() if not state.met} or working
        return min(late, key=lambda rank: late[rank].last_event_at)

    def status(self) -> str:
        """The state of the job in a line, e.g. `2 of 2 ranks up: load tiny_llama`."""
        up = sum(state.pid is not None for state in self.ranks.values())
        first = next(iter(self.ranks.values()))
        return f"{up} of {len(self.ranks)} ranks up: {first.stage}"

    def read(self, seconds: float) -> None:
        """Handle the ranks' events, waiting up to `seconds` for the first of them."""
        while ready := self._selector.select(seconds):
            for key, _ in ready:
                if key.fileobj is self._listener:
                    stream, _address = self._listener.accept()
                    self._selector.register(stream, selectors.EVENT_READ, _Connection(stream))
                else:
                    self._receive(key.data)
            seconds = 0  # the rest of what is there: a new connection's first events, too

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.stream.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        *lines, rest = (connection.pending + data).split(b"\n")
        connection.pending = rest
        try:
            for line in lines:
                self._handle(connection, Event.from_line(line))
            if data and len(rest) <= MAX_LINE_BYTES:
                return
        except (ValueError, RecursionError) as error:
            progress.detail(f"rank {connection.rank} sent an invalid event: {error}")
        self._selector.unregister(connection.stream)
        connection.stream.close()
        if connection.rank is not None and not self.ranks[connection.rank].done:
            self._fail(Event(rank=connection.rank, event="error", exit_code=EXIT_FAILED))

    def _handle(self, connection: _Connection, event: Event) -> None:
        state = self.ranks.get(event.rank)
        if state is None or connection.rank not in (None, event.rank):
            raise ValueError(f"rank {event.rank} is not on this machine")
        connection.rank = event.rank
        state.pid, state.last_event_at = connection.pid, time.monotonic()
        if event.event == "stage":
            state.stage = event.text
            state.met = state.met or event.text == MET
        elif event.event == "text":
            progress.text(event.text)
        elif event.event == "title":
            progress.title(event.text)
        elif event.event == "note":
            progress.note(event.text)
        elif event.event == "done":
            state.done = True
        else:
            self._fail(event)

    def _fail(self, failure: Event) -> None:
        """The first failure is the cause; the others follow from it."""
        self.failure = self.failure or failure
