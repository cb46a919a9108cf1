"""Progress of long work, on standard error: a live line on a terminal, plain lines elsewhere.

    with progress.step("load weights", total=271, unit="tensors") as step:
        step.advance()
    progress.note("...")

Text for standard output goes through `text`, so that it and the live line do not garble each
other. In all else control characters are escaped: a name that somebody else chose neither forges
a line nor steers the terminal. Whatever is shown is logged too, and thus is in run.log. If the
program that imports us logs to the terminal, or sets a level above INFO for `lite_runner`, its
logging alone decides. So does the log in JSON that `configure` sets up.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timezone
from typing import Any, Literal, Protocol, TextIO

from lite_runner.errors import escaped, shown

logger = logging.getLogger("lite_runner.progress")

REDRAW_S = 0.1
PLAIN_LINE_S = 10.0  # elsewhere than on a terminal: at most one line in this time ...
PLAIN_LINE_SHARE = 0.1  # ... and only after this share of the work, ...
PLAIN_LINE_AT_LAST_S = 60.0  # ... or this time
SPEED_S = 1.0  # before that a speed says little
BAR = 20  # characters
ERASE = "\r\x1b[K"
NOTEBOOK_WIDTH = 80
Color = Literal["red", "dim"]
Phase = Literal["meet", "read", "pack", "compile"]  # of a profile
Observer = Callable[[Phase, str], AbstractContextManager[None]]
_COLORS = {"red": "\x1b[31m", "dim": "\x1b[2m"}


class Sink(Protocol):
    """Shows the progress of a process that has no terminal of its own."""

    def stage(self, text: str) -> None: ...  # current activity
    def note(self, text: str) -> None: ...  # a permanent line
    def text(self, text: str) -> None: ...  # for standard output
    def title(self, text: str) -> None: ...  # for standard output if that is a terminal


class Step:
    """Work in progress. `advance` may be called from any thread."""

    def __init__(
        self, progress: Progress, name: str, total: float | None, unit: str, done: float
    ) -> None:
        self.name = escaped(name)
        self.total = total
        self.unit = unit
        self.done = self.before = done
        self.started = time.monotonic()
        self.shown_at = self.started
        self.shown_done = 0.0
        self._progress = progress

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done."""
        self._progress._advance(self, amount)

    def describe(self) -> str:
        """The state in a line, e.g. `load weights: 27 of 271 tensors (10%)`; of bytes also the
        speed and the time left."""
        if not self.done:
            amount = " ..."
        elif self.total is None:
            amount = f": {_amount(self.done, self.unit)}"
        else:
            whole = _amount(self.total, self.unit)
            amount = f": {_number(self.done, self.unit)} of {whole} ({self.done / self.total:.0%})"
        return self.name + amount + self._speed()

    def _speed(self) -> str:
        elapsed = time.monotonic() - self.started
        if self.unit != "B" or not self.done or elapsed < SPEED_S:
            return ""
        rate = max(0.0, self.done - self.before) / elapsed
        left = ""
        if self.total is not None and rate:
            left = f", {duration((self.total - self.done) / rate)} left"
        return f", {_number(rate, self.unit)} MB/s{left}"

    def bar(self) -> str:
        """A bar of the bytes that are done; empty for other units."""
        if self.unit != "B" or not self.total:
            return ""
        return f"[{'#' * int(BAR * min(1, self.done / self.total)):<{BAR}}] "

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
        self._json: _JsonLines | None = None
        self._observer: Observer | None = None

    def observe(self, observer: Observer | None) -> None:
        """Enter `observer(phase, name)` with each step that is a phase from now on; None: no
        observer."""
        self._observer = observer

    def redirect(self, sink: Sink | None) -> None:
        """Show everything through `sink` from now on; None: in this process."""
        self._sink = sink

    def configure(self, verbosity: int, log_format: Literal["text", "json"] = "text") -> None:
        """0: silent, 1: steps and notes, 2: details too. Text is always written. json: all lines of
        standard error, those of other packages' loggers too, are JSON."""
        self.verbosity = verbosity
        if self._json is not None:
            logging.root.removeHandler(self._json)
            self._json = None
        if log_format == "json":
            self._json = _JsonLines(self)
            logging.root.addHandler(self._json)
            logging.getLogger("lite_runner").setLevel(logging.INFO)
            logging.captureWarnings(True)

    @contextmanager
    def step(
        self,
        name: str,
        total: float | None = None,
        unit: str = "",
        done: float = 0.0,
        phase: Phase | None = None,
    ) -> Iterator[Step]:
        """Show `name` as in progress. `total` counts `unit`s, of which `done` were done before;
        `unit="B"`: bytes, shown in MB. `phase`: what a profile counts it as."""
        step = Step(self, name, total, unit, done)
        with self._lock:
            self._steps.append(step)
            self._show(step)
        outcome = "interrupted"
        try:
            observer = self._observer
            with nullcontext() if observer is None or phase is None else observer(phase, name):
                yield step
            outcome = "done"
        except BrokenPipeError:  # the reader has gone, which is not a failure
            outcome = "ended"
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            with self._lock:
                self._steps.remove(step)
                if outcome != "ended":
                    self._line(step.summary(outcome))
                if self._steps and _is_terminal(sys.stderr):
                    self._show(self._steps[-1])

    def note(self, text: str, color: Color | None = None) -> None:
        """A line for the user; `color`: where the terminal has them."""
        with self._lock:
            self._line(text, color)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """A line of `fields`; in a log in JSON they are its keys, and `name` is the message."""
        if self._json is not None:
            logger.info(name, extra={"fields": fields})
        else:
            self.note(" ".join(f"{key}={_quoted(value)}" for key, value in fields.items()))

    def error(self, text: str, exception: BaseException | None = None) -> None:
        """The error that ended the run: `text`, or the traceback of an `exception`, which ends with
        it."""
        if self._json is not None:
            logger.error(text, exc_info=exception)
        elif exception is not None:
            print(
                escaped("".join(traceback.format_exception(exception)), keep="\n\t"),
                end="",
                file=sys.stderr,
            )
        else:
            print(shown(text), file=sys.stderr)

    def detail(self, text: str) -> None:
        """A line for verbosity=2; it is always logged."""
        with self._lock:
            if self.verbosity >= 2:
                self._line(text)
            else:
                logger.info(shown(text), extra={"is_detail": True})

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
                waited = now - step.shown_at
                due = waited >= PLAIN_LINE_S and (
                    not step.total
                    or waited >= PLAIN_LINE_AT_LAST_S
                    or step.done - step.shown_done >= PLAIN_LINE_SHARE * step.total
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
            self._draw(step.bar() + step.describe())

    def _draw(self, text: str) -> None:
        """Draw the live line, unless the cursor is behind unfinished text."""
        if self.verbosity > 0 and not self._breaks_text() and not _shown_by_logging():
            # Never as wide as the terminal: a wrapped line could not be erased.
            shown_text = escaped(text)[: _width(sys.stderr) - 1]
            sys.stderr.write(_erase_line(sys.stderr) + shown_text)
            sys.stderr.flush()
            self._live = True

    def _line(self, text: str, color: Color | None = None) -> None:
        """A permanent line."""
        text = shown(text)
        logger.info(text)
        if self._sink is not None:
            if self.verbosity > 0:
                self._sink.note(text)
        elif self.verbosity > 0 and sys.stderr is not None and not _shown_by_logging():
            self._erase()
            start = "\n" if self._breaks_text() else ""
            self._mid_line = self._mid_line and not start
            if color is not None and _is_terminal(sys.stderr) and not os.environ.get("NO_COLOR"):
                text = f"{_COLORS[color]}{text}\x1b[0m"
            sys.stderr.write(f"{start}{text}\n")
            sys.stderr.flush()

    def _breaks_text(self) -> bool:
        """True if the cursor is behind unfinished text, on a terminal that both streams share."""
        return self._mid_line and _is_terminal(sys.stdout) and _is_terminal(sys.stderr)

    def _erase(self) -> None:
        if self._live:
            sys.stderr.write(_erase_line(sys.stderr))
            sys.stderr.flush()
            self._live = False


class _JsonLines(logging.StreamHandler):  # type: ignore[type-arg]
    """Log records on standard error, each a line of JSON with its time and level."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(sys.stderr)
        self._progress = progress

    def filter(self, record: logging.LogRecord) -> bool:
        least = 2 if hasattr(record, "is_detail") else 1
        return record.levelno > logging.INFO or self._progress.verbosity >= least

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return escaped(json.dumps(line, ensure_ascii=False), escape=_in_json)


def _in_json(character: str) -> str:
    return json.dumps(character)[1:-1]


def _quoted(value: object) -> str:
    """The value of a field in a line of fields: with quotation marks where it would not be read as
    one word."""
    text = str(value)
    if text.isprintable() and text and not re.search(r'[\s"\\]', text):
        return text
    return escaped(json.dumps(text, ensure_ascii=False), escape=_in_json)


def _shown_by_logging() -> bool:
    """True if the importing program shows our log records itself, or suppresses them by level: a
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
    """True if `stream` writes to standard output or error, also if it is not sys.stdout any more:
    MindSpore replaces that object when it compiles a graph."""
    try:
        return stream in (sys.stdout, sys.stderr) or stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):  # it has none, or is closed
        return False


def _is_terminal(stream: TextIO | None) -> bool:
    """A notebook is one: a line behind a carriage return replaces the one before."""
    if stream is None:
        return False
    return _is_notebook(stream) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def _is_notebook(stream: TextIO) -> bool:
    return type(stream).__module__ == "ipykernel.iostream"


def _width(stream: TextIO) -> int:
    if _is_notebook(stream):
        return NOTEBOOK_WIDTH
    return os.get_terminal_size(stream.fileno()).columns or 80


def _erase_line(stream: TextIO) -> str:
    """Notebooks know the carriage return, and not how to erase."""
    return f"\r{' ' * NOTEBOOK_WIDTH}\r" if _is_notebook(stream) else ERASE


def duration(seconds: float) -> str:
    """Seconds for humans: 3 min."""
    minutes = seconds / 60
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def _number(amount: float, unit: str) -> str:
    return f"{amount / 1e6:.1f}" if unit == "B" else f"{amount:,.0f}"


def _amount(amount: float, unit: str) -> str:
    return f"{_number(amount, unit)} {'MB' if unit == 'B' else unit}".rstrip()


_shared = Progress()
configure = _shared.configure
redirect = _shared.redirect
observe = _shared.observe
step = _shared.step
note = _shared.note
event = _shared.event
error = _shared.error
detail = _shared.detail
status = _shared.status
text = _shared.text
title = _shared.title
