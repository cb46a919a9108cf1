"""Progress of long work, on standard error: a live line on a terminal, plain lines elsewhere.

    with progress.step("load weights", total=271, unit="tensors") as step:
        step.advance()
    progress.note("...")

Text for standard output goes through `text`, so that it and the live line do not garble each
other. Whatever is shown is logged too, and thus is in run.log. If the program that imports us logs
to the terminal, or sets a level above INFO for `lite_runner`, its logging alone decides.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

logger = logging.getLogger("lite_runner.progress")

REDRAW_S = 0.1
PLAIN_LINE_S = 10.0  # elsewhere than on a terminal: at most one line in this time ...
PLAIN_LINE_SHARE = 0.1  # ... and only after this share of the work
ERASE = "\r\x1b[K"


class Sink(Protocol):
    """Shows the progress of a process that has no terminal of its own."""

    def stage(self, text: str) -> None: ...  # current activity
    def note(self, text: str) -> None: ...  # a permanent line
    def text(self, text: str) -> None: ...  # for standard output
    def title(self, text: str) -> None: ...  # for standard output if that is a terminal


class Step:
    """Work in progress. `advance` may be called from any thread."""

    def __init__(self, progress: Progress, name: str, total: float | None, unit: str) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0.0
        self.started = time.monotonic()
        self.shown_at = self.started
        self.shown_done = 0.0
        self._progress = progress

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done."""
        self._progress._advance(self, amount)

    def describe(self) -> str:
        """The state in a line, e.g. `load weights: 27 of 271 tensors (10%)`."""
        if not self.done:
            amount = " ..."
        elif self.total is None:
            amount = f": {_amount(self.done, self.unit)}"
        else:
            whole = _amount(self.total, self.unit)
            amount = f": {_number(self.done, self.unit)} of {whole} ({self.done / self.total:.0%})"
        return self.name + amount

    def summary(self, outcome: str) -> str:
        """The final line, e.g. `load weights: 271 tensors in 0.4 s`."""
        seconds = f"{time.monotonic() - self.started:.1f} s"
        if outcome != "done":
            return f"{self.name}: {outcome} after {seconds}"
        return (
            f"{self.name}: {_amount(self.done, self.unit) if self.done else outcome} in {seconds}"
        )


class Progress:
    """Shows progress. The process has one: see below."""

    def __init__(self, verbosity: int = 1) -> None:
        self.verbosity = verbosity
        self._steps: list[Step] = []  # the last, innermost one is shown
        self._live = False  # the terminal shows a live line
        self._mid_line = False  # the last text did not end with a newline
        self._lock = threading.RLock()
        self._sink: Sink | None = None

    def redirect(self, sink: Sink | None) -> None:
        """Show everything through `sink` from now on; None: in this process."""
        self._sink = sink

    def configure(self, verbosity: int) -> None:
        """0: silent, 1: steps and notes, 2: details too. Text is always written."""
        self.verbosity = verbosity

    @contextmanager
    def step(self, name: str, total: float | None = None, unit: str = "") -> Iterator[Step]:
        """Show `name` as in progress. `total` counts `unit`s; `unit="B"`: bytes, shown in MB."""
        step = Step(self, name, total, unit)
        with self._lock:
            self._steps.append(step)
            self._show(step)
        outcome = "interrupted"
        try:
            yield step
            outcome = "done"
        except Exception:
            outcome = "failed"
            raise
        finally:
            with self._lock:
                self._steps.remove(step)
                self._line(step.summary(outcome))
                if self._steps and _is_terminal(sys.stderr):
                    self._show(self._steps[-1])

    def note(self, text: str) -> None:
        """A line for the user."""
        with self._lock:
            self._line(text)

    def detail(self, text: str) -> None:
        """A line for verbosity=2; it is always logged."""
        with self._lock:
            if self.verbosity >= 2:
                self._line(text)
            else:
                logger.info(text)

    def status(self, text: str) -> None:
        """The live line: on a terminal only, and not logged. "" erases it."""
        with self._lock:
            if self._sink is not None:
                self._sink.stage(text)
            elif not text:
                self._erase()
            elif _is_terminal(sys.stderr):
                self._draw(text)

    def text(self, text: str) -> None:
        """Write `text` to standard output, verbatim and flushed."""
        if not text:
            return
        with self._lock:
            if self._sink is not None:
                self._sink.text(text)
                return
            self._erase()
            sys.stdout.write(text)
            sys.stdout.flush()
            self._mid_line = not text.endswith("\n")

    def title(self, text: str) -> None:
        """A heading for the text that follows, on a terminal only."""
        with self._lock:
            if self._sink is not None:
                self._sink.title(text)
            elif _is_terminal(sys.stdout):
                self.text(f"{text}\n")

    def _advance(self, step: Step, amount: float) -> None:
        with self._lock:
            step.done += amount
            now = time.monotonic()
            if self._sink is not None or _is_terminal(sys.stderr):
                due = now - step.shown_at >= REDRAW_S
            else:
                due = now - step.shown_at >= PLAIN_LINE_S and (
                    not step.total or step.done - step.shown_done >= PLAIN_LINE_SHARE * step.total
                )
            if due and step in self._steps[-1:]:
                self._show(step)
                step.shown_at, step.shown_done = now, step.done

    def _show(self, step: Step) -> None:
        """The state of a step: on a terminal in the live line, elsewhere on a line of its own."""
        if self._sink is not None:
            self._sink.stage(step.describe())
        elif not _is_terminal(sys.stderr):
            self._line(step.describe())
        else:
            self._draw(step.describe())

    def _draw(self, text: str) -> None:
        """Draw the live line, unless the cursor is behind unfinished text."""
        if self.verbosity > 0 and not self._breaks_text() and not _shown_by_logging():
            # Never as wide as the terminal: a wrapped line could not be erased.
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write(ERASE + text[: width - 1])
            sys.stderr.flush()
            self._live = True

    def _line(self, text: str) -> None:
        """A permanent line."""
        logger.info(text)
        if self._sink is not None:
            if self.verbosity > 0:
                self._sink.note(text)
        elif self.verbosity > 0 and sys.stderr is not None and not _shown_by_logging():
            self._erase()
            start = "\n" if self._breaks_text() else ""
            self._mid_line = self._mid_line and not start
            sys.stderr.write(f"{start}{text}\n")
            sys.stderr.flush()

    def _breaks_text(self) -> bool:
        """Whether the cursor is behind unfinished text, on a terminal that both streams share."""
        return self._mid_line and _is_terminal(sys.stdout) and _is_terminal(sys.stderr)

    def _erase(self) -> None:
        if self._live:
            sys.stderr.write(ERASE)
            sys.stderr.flush()
            self._live = False


def _shown_by_logging() -> bool:
    """Whether the importing program shows our log records itself, or suppresses them by level: a
    line of ours would be a duplicate, or unwanted."""
    place: logging.Logger | None = logger
    while place is not None:
        if place.level > logging.INFO and place is not logging.root:  # WARNING by default
            return True
        for handler in place.handlers:
            if isinstance(handler, logging.StreamHandler) and _is_standard(handler.stream):
                return True
        place = place.parent if place.propagate else None
    return False


def _is_standard(stream: TextIO) -> bool:
    """Whether `stream` writes to standard output or error, also if it is not sys.stdout any more:
    MindSpore replaces that object when it compiles a graph."""
    try:
        return stream in (sys.stdout, sys.stderr) or stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):  # it has none, or is closed
        return False


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def _number(amount: float, unit: str) -> str:
    return f"{amount / 1e6:.1f}" if unit == "B" else f"{amount:,.0f}"


def _amount(amount: float, unit: str) -> str:
    return f"{_number(amount, unit)} {'MB' if unit == 'B' else unit}".rstrip()


_shared = Progress()
configure = _shared.configure
redirect = _shared.redirect
step = _shared.step
note = _shared.note
detail = _shared.detail
status = _shared.status
text = _shared.text
title = _shared.title
