"""Questions answered in a child process, since the answer may crash, hang, or take memory.

    python probe.py QUESTION

One answer goes to standard output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from lite_runner.distributed.job import exit_text
from lite_runner.distributed.msrun import WRAPPER
from lite_runner.distributed.msrun_wrapper import PARENT_VARIABLE
from lite_runner.errors import EnvironmentFault, RunnerError
from lite_runner.records import dataclass

Question = Literal["mindspore", "ascend", "operators", "lite"]
_PROBE = Path(__file__)
_LINES = 6  # of what a child wrote last, in a message


@dataclass(frozen=True)
class ProcessOutput:
    """The exit status and output of a child process."""

    code: int
    output: str
    errors: str

    def tail(self) -> str:
        """The last lines of its errors, or of its output, to go below a message."""
        lines = [line for line in (self.errors or self.output).splitlines() if line.strip()]
        return "".join(f"\n{line.rstrip()[:300]}" for line in lines[-_LINES:])


def ask(question: Question, timeout_s: float) -> str:
    """The answer of a child process to a question.

    Raises EnvironmentFault, with its output, where it fails, crashes, or takes longer than
    `timeout_s` seconds.
    """
    command = [sys.executable, str(WRAPPER), str(_PROBE), question]
    ended = run(command, timeout_s, {**os.environ, PARENT_VARIABLE: str(os.getpid())})
    if ended.code == 0:
        return ended.output.strip()
    message, _, hint = ended.output.strip().partition("\n-> ")
    if ended.code == EnvironmentFault.exit_code and message:
        raise EnvironmentFault(message, hint)
    verb = "ended with" if ended.code >= 0 else "was"
    wrote = ended.tail().replace("\n", "\n    ")
    raise EnvironmentFault(f"a process that tries it {verb} {exit_text(ended.code)}{wrote}")


def run(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> ProcessOutput:
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
        with suppress(ProcessLookupError):  # what it started may outlive it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return ProcessOutput(process.returncode, output, errors)


def mindspore() -> str:
    """Import MindSpore and compute on the CPU."""
    return f"{_computes_on('CPU')}, computes on the CPU"


def ascend() -> str:
    """Compute on the first Ascend device."""
    from lite_runner.system import environment

    soc = environment.ascend_soc()
    _computes_on("Ascend")
    return f"{soc}, MindSpore computes on the first"


def operators() -> str:
    """Load our operators."""
    from lite_runner import native

    found, amx = native.instructions(), native.amx()
    if amx in ("", "used"):
        return found
    return f"{found}; this processor has AMX, which is not used: {amx}"


def lite() -> str:
    """Import MindSpore Lite."""
    from lite_runner.backends.lite.engines.lite import version

    return version()


def _computes_on(device: str) -> str:
    """The version of the MindSpore that does."""
    from lite_runner.system import environment

    environment.import_mindspore()
    from lite_runner.backends.mindspore.device import try_device

    return try_device(device)


def main() -> int:
    """Answer; an error of ours goes to standard output as well, its hint behind ->."""
    answer = os.dup(1)
    os.dup2(2, 1)  # output of libraries is not an answer
    questions = {"mindspore": mindspore, "ascend": ascend, "operators": operators, "lite": lite}
    code = 0
    try:
        text = questions[sys.argv[1]]()
    except RunnerError as error:
        code, text = error.exit_code, f"{error.message}\n-> {error.hint}"
    os.write(answer, text.encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
