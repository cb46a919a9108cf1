"""Chat templates: untrusted Jinja programs, rendered in a process of their own.

jinja2's sandbox keeps a template from Python's internals and from changing its inputs. It bounds
neither time nor memory, and counting operators, calls and lengths inside it would bound them only
as far as the count is complete: filters, str's methods, comparisons of shared lists, regular
expressions and the compiler itself each build or compute as much as they are told to. So the kernel
bounds the process: its address space, its processor time, and no files; who asks it bounds the time
on the clock. Nothing that a template does, a crash of the interpreter included, reaches the runner.

The process is started once and answers in a fraction of a millisecond; it imports jinja2 in place
of this one. The dialect is that of transformers.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.records import dataclass
from lite_runner.text import template_worker
from lite_runner.text.template_worker import LENGTH, NO_MEMORY

MAX_TEMPLATE_CHARS = 1 << 20
_HINT = "check the roles and their order, or run_mode=predict without chat=true"
# Signals sent by the kernel's OOM killer and other programs, never caused by a template.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOOK_S = 0.25  # interval of checking whether a silent process is stopped
_ENVIRONMENT = ("LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "TZ")  # passed on to it


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering."""

    seconds: int = 5  # of a processor
    wall_seconds: float = 60.0  # of the clock, for busy processors
    memory: int = 512 << 20  # bytes of address space, of which Python and jinja2 take some 60 MiB
    chars: int = 16 << 20  # of its output


LIMITS = TemplateLimits()
_lock = threading.Lock()
_process: TemplateProcess | None = None  # guarded by the lock


def render_template(
    template: str,
    values: Mapping[str, Any],
    *,
    source: str,
    limits: TemplateLimits = LIMITS,
    of_task: bool = False,
) -> str:
    """Render `template` with `values`, which are JSON. Threads take turns. `of_task`: in lm_eval's
    dialect, not that of chats.

    Raises ArtifactError naming `source` if it fails, or takes more than `limits`, and
    EnvironmentFault where the process cannot be started, or is killed or stopped twice.
    """
    kind, of, hint = ("template", "task", "") if of_task else ("chat template", "model", _HINT)
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ArtifactError(
            f"{source}: {kind} of {len(template)} characters, "
            f"at most {MAX_TEMPLATE_CHARS} are expected"
        )
    with _lock:
        try:
            try:
                return _started(limits).render(template, values, of_task=of_task)
            except TemplateProcessError:  # not the template's fault: retry
                return _started(limits).render(template, values, of_task=of_task)
        except ValueError as error:
            raise ArtifactError(f"{source}: the {kind} {error}", hint) from None
        except TemplateLimitError as error:
            _close()
            raise ArtifactError(
                f"{source}: the {kind} failed: {error}, which no template of a {of} does",
                ""
                if of_task
                else "take the model's files from where it was published, or run_mode=predict"
                " without chat=true",
            ) from None
        except TemplateProcessError as error:
            raise EnvironmentFault(
                f"the process for chat templates {error}, and the next one, too",
                "free memory, or find what ends processes on this machine",
            ) from None
        except OSError as error:
            _close()
            raise EnvironmentFault(
                f"no process for chat templates: {error}", "free memory"
            ) from error
        except BaseException:
            _close()
            raise


def _started(limits: TemplateLimits) -> TemplateProcess:
    """This process' renderer; after a fork, the parent's is left alone."""
    global _process
    if _process is None or not _process.is_alive or _process.limits != limits:
        _close()
        _process = TemplateProcess(limits)
    return _process


@atexit.register
def _close() -> None:
    global _process
    if _process is not None:
        _process.close()
    _process = None


class TemplateProcess:
    """A process that renders one template after another. Not to be shared between threads."""

    def __init__(self, limits: TemplateLimits) -> None:
        """Start it. Raises OSError where it cannot be."""
        self.limits = limits
        self._owner = os.getpid()
        settings = {
            "path": sys.path,
            "bytes": limits.memory,
            "seconds": limits.seconds,
            "chars": limits.chars,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", template_worker.__file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",  # so that no folder of the user's stays in use
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )

    @property
    def is_ours(self) -> bool:
        """True if this process started it, rather than its parent before a fork."""
        return os.getpid() == self._owner

    @property
    def is_alive(self) -> bool:
        """True if it can answer."""
        return self.is_ours and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process, which may have ended."""
        return self._process.pid

    def render(self, template: str, values: Mapping[str, Any], *, of_task: bool = False) -> str:
        """The text. Raises ValueError, which says what is wrong with the template, and
        TemplateLimitError or TemplateProcessError, after which the process has ended."""
        assert self._process.stdin and self._process.stdout
        deadline = time.monotonic() + self.limits.wall_seconds
        asked = {"template": template, "values": values, "of_task": of_task}
        request = json.dumps(asked).encode()
        try:
            self._write(LENGTH.pack(len(request)) + request, deadline)
            (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
            answer = json.loads(self._read(length, deadline).decode("utf-8", "surrogatepass"))
        except TimeoutError:
            self.close()
            raise TemplateLimitError(f"it takes more than {self.limits.wall_seconds:g} s") from None
        except _Stopped:
            self.close()
            raise TemplateProcessError("was stopped") from None
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self._ended() from None
        except BaseException:
            self.close()  # a late answer would be taken for the next one's
            raise
        if "error" in answer:
            where = f" at line {answer['line']}" if answer["line"] else ""
            raise ValueError(f"failed{where}: {answer['error']}")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process; idempotent."""
        if self.is_ours:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout
        parts: list[bytes] = []
        while size:
            self._wait(self._process.stdout.fileno(), select.POLLIN, deadline)
            part = self._process.stdout.read(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _write(self, data: bytes, deadline: float) -> None:
        assert self._process.stdin
        target, view = self._process.stdin.fileno(), memoryview(data)
        while view:
            self._wait(target, select.POLLOUT, deadline)
            view = view[os.write(target, view[: select.PIPE_BUF]) :]

    def _wait(self, file: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(file, event)
        while not poll.poll(min(_LOOK_S, max(0, deadline - time.monotonic())) * 1000):
            if time.monotonic() >= deadline:
                raise TimeoutError
            found = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self._process.pid, found) is not None:
                raise _Stopped

    def _ended(self) -> TemplateLimitError | TemplateProcessError:
        code = self._process.wait()
        self.close()
        if code == -signal.SIGXCPU:
            return TemplateLimitError(f"it computes for more than {self.limits.seconds} s")
        if code == NO_MEMORY:
            return TemplateLimitError(f"it needs more than {self.limits.memory >> 20} MiB")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if -code in _FROM_OUTSIDE:
            return TemplateProcessError(f"ended with {how}")
        return TemplateLimitError(f"the process that renders it ended with {how}")


class TemplateLimitError(Exception):
    """A template exceeded a limit; the text says which."""


class TemplateProcessError(Exception):
    """Something else than the template ended or stopped the process."""


class _Stopped(Exception):
    """The process was stopped by SIGSTOP, and would answer once continued."""
