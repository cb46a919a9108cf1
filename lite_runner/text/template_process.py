"""The process that renders chat templates, from the outside: started, asked, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from lite_runner.records import dataclass
from lite_runner.text import template_worker
from lite_runner.text.template_worker import LENGTH, NO_MEMORY

_ENVIRONMENT = ("LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "TZ")  # that it sees of ours


@dataclass(frozen=True)
class Limits:
    """What one rendering may take."""

    seconds: int = 5  # of a processor
    wall_seconds: float = 60.0  # where processors are busy
    memory: int = 512 << 20  # bytes of address space, of which Python and jinja2 take some 60 MiB
    chars: int = 16 << 20  # of what it writes


class TemplateProcess:
    """A process that renders one template after another. Not to be shared between threads."""

    def __init__(self, limits: Limits) -> None:
        """Start it. Raises OSError where it cannot be."""
        self.limits = limits
        self._owner = os.getpid()
        told = {
            "path": sys.path,
            "bytes": limits.memory,
            "seconds": limits.seconds,
            "chars": limits.chars,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", template_worker.__file__, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",  # no folder of the user's is kept busy
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and not one that forked this one."""
        return os.getpid() == self._owner

    @property
    def is_alive(self) -> bool:
        """Whether it is there to be asked."""
        return self.is_ours and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process, which may have ended."""
        return self._process.pid

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """The text. Raises ValueError, which says what is wrong with the template, and
        TemplateLimitError, after which the process has ended."""
        assert self._process.stdin and self._process.stdout
        deadline = time.monotonic() + self.limits.wall_seconds
        request = json.dumps({"template": template, "values": values}).encode()
        try:
            _write(self._process.stdin.fileno(), LENGTH.pack(len(request)) + request, deadline)
            (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
            answer = json.loads(self._read(length, deadline).decode("utf-8", "surrogatepass"))
        except TimeoutError:
            self.close()
            raise TemplateLimitError(f"it takes more than {self.limits.wall_seconds:g} s") from None
        except (EOFError, BrokenPipeError):
            raise TemplateLimitError(self._ended()) from None
        except BaseException:
            self.close()  # the answer would come later, and be taken for the next one's
            raise
        if "error" in answer:
            where = f" at line {answer['line']}" if answer["line"] else ""
            raise ValueError(f"failed{where}: {answer['error']}")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process; once is enough."""
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
            _wait(self._process.stdout.fileno(), select.POLLIN, deadline)
            part = self._process.stdout.read(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _ended(self) -> str:
        code = self._process.wait()
        self.close()
        if code == -signal.SIGXCPU:
            return f"it computes for more than {self.limits.seconds} s"
        if code == NO_MEMORY:
            return f"it needs more than {self.limits.memory >> 20} MiB"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process that renders it ended with {how}"


class TemplateLimitError(Exception):
    """A template took more than it may; the text says of what."""


def _write(target: int, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        _wait(target, select.POLLOUT, deadline)
        view = view[os.write(target, view[: select.PIPE_BUF]) :]


def _wait(file: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(file, event)
    if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
