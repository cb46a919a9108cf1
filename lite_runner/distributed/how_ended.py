"""How processes ended, and what their logs say last, in the words of messages."""

from __future__ import annotations

import signal
from pathlib import Path

LOG_LINES = 8  # of a log or traceback in a message


def exit_text(code: int) -> str:
    """An exit code in words; negative: the signal that killed the process."""
    return f"exit code {code}" if code >= 0 else f"killed by {_name(-code)}"


def scheduler_text(code: int | None, log: str) -> str:
    """Why a scheduler ended, whose exit code and log these are; None: not known.

    MindSpore's exits with 1 where a rank of any machine does not answer for some 30 s.
    """
    if code is not None and code < 0:
        return f"the scheduler was ended by signal {-code} ({_name(-code)})"
    if code is None or "timed out node" in log:
        return "the scheduler has lost a rank"
    return f"the scheduler ended before its ranks were done: {exit_text(code)}"


def tail(log: Path) -> str:
    """The last 64 KiB of a log; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - (1 << 16)))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(text: str) -> list[str]:
    """The last LOG_LINES lines that are not empty, indented."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [f"    {line}" for line in lines[-LOG_LINES:]]


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
