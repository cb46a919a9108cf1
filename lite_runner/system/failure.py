"""Failures: exit status, message and traceback of the exception that ends a process."""

from __future__ import annotations

import traceback

from lite_runner.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, RunnerError
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
