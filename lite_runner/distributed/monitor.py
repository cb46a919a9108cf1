"""Monitors the ranks of this machine by their events: stages, rank 0's text, failures, exits."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from pathlib import Path

from lite_runner import progress
from lite_runner.distributed.events import MAX_LINE_BYTES, MET, Event
from lite_runner.errors import EXIT_FAILED, EnvironmentFault
from lite_runner.records import dataclass

_CREDENTIALS = struct.Struct("3i")  # process, user and group id of the other end
_READ_BYTES = 1 << 16


@dataclass
class RankState:
    """The state of one rank, from its events so far."""

    pid: int | None = None  # None: not started yet
    stage: str = "starting"
    met: bool = False  # it has joined the other ranks
    done: bool = False
    last_event_at: float = 0.0  # time.monotonic()


@dataclass(frozen=True)
class RankFailure:
    """The first rank that failed, and how; no message: its process died."""

    rank: int
    exit_code: int = EXIT_FAILED
    message: str = ""
    hint: str = ""
    traceback: str = ""


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
        self.failure: RankFailure | None = None
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
            self._fail(RankFailure(connection.rank))

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
            self._fail(
                RankFailure(event.rank, event.exit_code, event.message, event.hint, event.traceback)
            )

    def _fail(self, failure: RankFailure) -> None:
        """The first failure is the cause; the others follow from it."""
        self.failure = self.failure or failure
