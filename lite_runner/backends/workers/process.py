"""The worker process: starting it, requests and answers, and never leaving it behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any

from lite_runner.backends.workers.python import WorkerPython, quoted_tail, worker_environment
from lite_runner.errors import EnvironmentFault, RunnerError
from lite_runner.system import memory

CLOSE_SECONDS = 1.0  # before it is killed
MAX_ANSWER = 1 << 24  # bytes; an answer is names and shapes, never data
_LENGTH = struct.Struct("<I")


OnEvent = Callable[[dict[str, Any]], None]


class WorkerProcess:
    """A process that answers framed JSON requests: see main.py for the protocol."""

    def __init__(
        self,
        own: WorkerPython,
        command: Sequence[str],
        descriptors: Sequence[int] = (),
        *,
        variables: Mapping[str, str] = MappingProxyType({}),
        needs: WorkerProcess | None = None,
    ) -> None:
        """Start `command`, of the product `own`; it inherits `descriptors`, and `variables` are
        added to its environment.

        While waiting for an answer, the process in `needs` is watched too; if it fails, its error
        is raised. Raises EnvironmentFault if `command` cannot be started.
        """
        self._product = own.product
        self._needs = needs
        self._kills_before = memory.oom_kills()
        self._log: IO[bytes] = tempfile.TemporaryFile(prefix="worker-")  # noqa: SIM115
        read_request, write_request = os.pipe()
        read_answer, write_answer = os.pipe()
        self._requests = os.fdopen(write_request, "wb", buffering=0)
        self._answers = os.fdopen(read_answer, "rb", buffering=0)
        self._reading = threading.Lock()  # of the thread that waits for an answer
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()

        def keep() -> None:
            # The worker is killed when the thread that started it ends, not the process
            # (prctl(2)): so a dedicated thread starts it, and waits for it.
            try:
                process = subprocess.Popen(
                    command,
                    stdin=read_request,
                    stdout=write_answer,
                    stderr=self_log,
                    pass_fds=descriptors,
                    env={**worker_environment(), **variables},
                    start_new_session=True,  # Ctrl-C in the terminal does not reach it
                )
            except OSError as error:
                started.put(error)
                return
            finally:
                os.close(read_request)
                os.close(write_answer)
            started.put(process)
            process.wait()

        self_log = self._log  # not self: a garbage-collected engine ends its worker
        self._keeper = threading.Thread(target=keep, name="worker", daemon=True)
        self._keeper.start()
        outcome = started.get()
        if isinstance(outcome, OSError):
            self.close()
            raise EnvironmentFault(f"{command[0]} cannot be started: {outcome}", own.remedy)
        self._process = outcome

    @property
    def pid(self) -> int:
        """Process id; the process may have ended."""
        return self._process.pid

    def ask(
        self,
        request: dict[str, Any],
        *,
        seconds: float,
        doing: str,
        refused: type[RunnerError] = RunnerError,
        on_event: OnEvent | None = None,
    ) -> dict[str, Any]:
        """The answer to a request; not thread-safe.

        `on_event` is called with what the process sends before it answers; `seconds` is how long it
        may be silent. Raises `refused` for an error of the product, after which the process still
        runs. Raises RunnerError if the process ended, timed out or sent an invalid answer; then,
        and on other exceptions such as KeyboardInterrupt, the process is ended.
        """
        message = self._next(request, seconds, doing)
        while on_event is not None and "event" in message:
            try:
                on_event(message["event"])
            except BaseException:
                self.close()  # a late answer would be taken for the next request's
                raise
            message = self._next(None, seconds, doing)
        if "error" in message:
            raise self._refusal(refused, message, doing)
        answer: dict[str, Any] = message.get("answer", {})
        return answer

    def begin(self, request: dict[str, Any]) -> None:
        """Send a request whose answer `check` takes; the process serves another one meanwhile."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `check` says
            self._send(request)

    def check(self, doing: str) -> None:
        """Take an answer that has come. Raises as `ask`."""
        message = self._next(None, CLOSE_SECONDS, doing)
        if "error" in message:
            raise self._refusal(RunnerError, message, doing)

    def close(self) -> None:
        """End the process, within about a second; idempotent."""
        with contextlib.suppress(OSError):
            self._requests.close()  # it exits at the end of its stdin
        if self._keeper.is_alive():
            self._keeper.join(CLOSE_SECONDS)
        if self._keeper.is_alive():
            self._process.kill()
            self._keeper.join(CLOSE_SECONDS)
        # Its number may be another file's from then on: a thread that waits for it closes it.
        if self._reading.acquire(blocking=False):
            self._answers.close()
            self._reading.release()

    def _next(self, request: dict[str, Any] | None, seconds: float, doing: str) -> dict[str, Any]:
        """The next message of the process, after sending it a request. Raises as `ask`."""
        product = self._product
        if self._requests.closed:
            raise RunnerError(f"{doing}: {product} was already closed")
        try:
            if request is not None:
                self._send(request)
            with self._reading:
                return self._message(time.monotonic() + seconds, doing)
        except TimeoutError as error:
            self.close()
            raise self._error(
                RunnerError, f"{doing}: {product} gave no answer in {seconds:g} s"
            ) from error
        except (EOFError, BrokenPipeError, ValueError) as error:
            if self._requests.closed:  # by another thread, while this one waited
                self.close()
                raise RunnerError(f"{doing}: {product} was closed") from error
            if isinstance(error, ValueError):
                self.close()
                raise self._error(
                    RunnerError, f"{doing}: invalid answer of the {product} process: {error}"
                ) from error
            self._keeper.join(CLOSE_SECONDS)  # waits for its exit code
            code = self._process.returncode
            self.close()
            message, lacking = _exit_status(code), memory.killed(code, self._kills_before)
            if lacking or (code == -signal.SIGABRT and memory.reports_out_of_memory(self._tail())):
                message += f"; {lacking}" if lacking else " (out of memory)"
                raise self._error(
                    EnvironmentFault, f"{doing}: {product} {message}", memory.TAKE_LESS
                ) from error
            raise self._error(RunnerError, f"{doing}: {product} {message}") from error
        except BaseException:
            self.close()
            raise

    def _send(self, request: dict[str, Any]) -> None:
        body = json.dumps(request).encode()
        self._requests.write(_LENGTH.pack(len(body)) + body)

    def _message(self, deadline: float, doing: str) -> dict[str, Any]:
        """The next message. Raises ValueError for anything that is none."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline, doing))
        if size > MAX_ANSWER:
            raise ValueError(f"a length of {size} bytes, at most {MAX_ANSWER}")
        message = json.loads(self._read(size, deadline, doing))
        if isinstance(message, dict) and (
            isinstance(message.get("answer"), dict)
            or isinstance(message.get("event"), dict)
            or message.get("error")
        ):
            return message
        raise ValueError(f"{str(message)[:80]!r}")

    def _read(self, size: int, deadline: float, doing: str) -> bytes:
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if self._needs is not None:
            poll.register(self._needs._answers, select.POLLIN)
        parts: list[bytes] = []
        while size:
            ready = {file for file, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            if not ready:
                raise TimeoutError
            if self._needs is not None and self._answers.fileno() not in ready:
                self._needs.check(doing)
                continue
            part = self._answers.read(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _refusal(self, kind: type[RunnerError], message: dict[str, Any], doing: str) -> RunnerError:
        reason = next(iter(str(message["error"]).strip().splitlines()), "no message")
        return self._error(kind, f"{doing}: {self._product} failed: {reason}")

    def _error(self, kind: type[RunnerError], message: str, hint: str = "") -> RunnerError:
        """An error with the last lines of the process's log."""
        return kind(message + quoted_tail(self._tail()), hint)

    def _tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 8192, max(0, size - 8192)).decode(errors="replace")


def _exit_status(code: int | None) -> str:
    if code is None:
        return "closed its end of the pipe"
    if code < 0:
        names = {int(one): one.name for one in signal.Signals}  # none of most real-time signals
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}"
