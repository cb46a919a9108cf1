"""Questions that are answered in a child process: what answers may crash, hang, or take memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from lite_runner.distributed.msrun import WRAPPER
from lite_runner.distributed.msrun_wrapper import PARENT_VARIABLE
from lite_runner.errors import EnvironmentFault
from lite_runner.records import dataclass

Question = Literal["mindspore", "ascend", "operators", "lite"]

_PROBE = Path(__file__).with_name("probe.py")
_LINES = 6  # of what a child wrote last, in a message


@dataclass(frozen=True)
class Ended:
    """How a child process ended, and what it wrote."""

    code: int
    output: str
    errors: str

    def tail(self) -> str:
        """The last lines of its errors, or of its output, to go below a message."""
        lines = [line for line in (self.errors or self.output).splitlines() if line.strip()]
        return "".join(f"\n{line.rstrip()[:300]}" for line in lines[-_LINES:])


def ask(question: Question, timeout_s: float) -> str:
    """What probe.py answers to a question. Raises EnvironmentFault, with what it says, where it
    fails, crashes, or takes longer than `timeout_s` seconds."""
    command = [sys.executable, str(WRAPPER), str(_PROBE), question]
    ended = run(command, timeout_s, {**os.environ, PARENT_VARIABLE: str(os.getpid())})
    if ended.code == 0:
        return ended.output.strip()
    message, _, hint = ended.output.strip().partition("\n-> ")
    if ended.code == EnvironmentFault.exit_code and message:
        raise EnvironmentFault(message, hint)
    raise EnvironmentFault(f"a process that tries it {_how(ended.code)}{ended.tail()}")


def run(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command to its end. Raises EnvironmentFault where that takes longer than `timeout_s`
    seconds, or it cannot be started. Neither it nor what it starts is left behind."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
    except OSError as error:
        raise EnvironmentFault(
            f"{command[0]}: cannot be started: {error.strerror or error}"
        ) from error
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(
            f"{Path(command[0]).name}: no end within {timeout_s:.0f} s"
        ) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return Ended(process.returncode, output, errors)


def _how(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
