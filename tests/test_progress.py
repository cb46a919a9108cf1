from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.progress import Progress
from lite_runner.sizing import align


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lite_runner.progress.time", clock)
    return clock


def test_plain_lines_at_start_and_finish(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    progress = Progress()
    with progress.step("load weights", total=271, unit="tensors") as step:
        for _ in range(271):
            step.advance()
        clock.now += 0.4
    with progress.step("compile"):
        clock.now += 3
    progress.note("done")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "load weights ...",
        "load weights: 271 tensors in 0.4 s",
        "compile ...",
        "compile: done in 3.0 s",
        "done",
    ]


def test_plain_lines_of_long_work_are_few(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    progress = Progress()
    with progress.step("download", total=1e9, unit="B") as step:
        for _ in range(1000):
            clock.now += 0.5
            step.advance(1e6)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12  # the start, every 10 %, the end
    assert lines[1] == "download: 100.0 of 1000.0 MB (10%), 2.0 MB/s, 8 min left"
    assert lines[-1] == "download: 1000.0 MB in 500.0 s"


def test_work_of_unknown_size_reports_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with Progress().step("generate", unit="tokens") as step:
        for _ in range(25):
            clock.now += 1
            step.advance()
    assert capsys.readouterr().err.splitlines() == [
        "generate ...",
        "generate: 10 tokens",
        "generate: 20 tokens",
        "generate: 25 tokens in 25.0 s",
    ]


def test_silence_keeps_text_and_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress()
    progress.configure(verbosity=0)
    with caplog.at_level(logging.INFO, "lite_runner"):
        with progress.step("load", total=2):
            progress.note("a note")
        progress.text("Paris")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Paris", "")
    assert "a note" in caplog.messages


@pytest.mark.parametrize(("verbosity", "shown"), [(0, ""), (1, ""), (2, "more\n")])
def test_details_are_shown_on_request(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, verbosity: int, shown: str
) -> None:
    with caplog.at_level(logging.INFO, "lite_runner"):
        Progress(verbosity).detail("more")
    assert capsys.readouterr().err == shown
    assert caplog.messages == ["more"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(ValueError(), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(), "interrupted")],
)
def test_a_step_that_ends_early_says_so(
    capsys: pytest.CaptureFixture[str], clock: Clock, error: BaseException, outcome: str
) -> None:
    with pytest.raises(type(error)), Progress().step("load"):
        clock.now += 0.2
        raise error
    assert capsys.readouterr().err.splitlines()[-1] == f"load: {outcome} after 0.2 s"


def test_nothing_to_do_is_done(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with Progress().step("load", total=0, unit="tensors"):
        pass
    assert capsys.readouterr().err == "load ...\nload: done in 0.0 s\n"


def test_a_closed_standard_error_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    progress = Progress()
    with progress.step("load", total=1) as step:
        step.advance()
        progress.text("Paris")
    assert sys.stdout.getvalue() == "Paris"  # type: ignore[attr-defined]


def on_terminal(script: str, columns: int = 60, stdout: int | None = None) -> str:
    """The bytes that a terminal receives from a Python script that has `progress` imported."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", "from lite_runner import progress\nimport time\n" + script],
        stdin=subprocess.DEVNULL,
        stdout=terminal if stdout is None else stdout,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(terminal)
    received = b""
    while chunk := read(controller):
        received += chunk
    os.close(controller)
    assert process.wait() == 0, received.decode()
    return received.decode().replace("\r\n", "\n")


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux: the other side is closed
        return b""


def screen(received: str) -> list[str]:
    """The lines that a reader sees in the end: a carriage return and erase undone by hand."""
    return [re.sub(r"^.*\r\x1b\[K", "", line) for line in received.split("\n")]


def test_a_terminal_shows_one_live_line() -> None:
    received = on_terminal(
        """
with progress.step("load weights", total=4, unit="tensors") as step:
    for _ in range(4):
        time.sleep(0.11)
        step.advance()
"""
    )
    assert received.count("\n") == 1
    assert "\r\x1b[Kload weights ..." in received
    for done in (1, 2, 3):
        assert f"\r\x1b[Kload weights: {done} of 4 tensors ({done * 25}%)" in received
    assert re.fullmatch(r"load weights: 4 tensors in \d+\.\d s", screen(received)[0])


def test_a_live_line_never_wraps() -> None:
    received = on_terminal("with progress.step('x' * 200): pass", columns=20)
    assert "\r\x1b[K" + "x" * 19 + "\r" in received


def test_streamed_text_and_the_live_line_do_not_mix() -> None:
    received = on_terminal(
        """
with progress.step("generate", total=3, unit="tokens") as step:
    for word in (" Paris", ".\\n", " It"):
        time.sleep(0.11)
        progress.text(word)
        step.advance()
    progress.note("a note")
"""
    )
    lines = screen(received)
    assert lines[:3] == [" Paris.", " It", "a note"]
    assert lines[3].startswith("generate: 3 tokens in ")
    unfinished = received[received.index(" Paris") : received.index(".\n")]
    assert unfinished == " Paris"  # nothing is drawn over a line of text that goes on


def test_text_for_a_file_leaves_the_live_line_alone(tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("wb") as file:
        received = on_terminal(
            """
with progress.step("generate", total=2) as step:
    for word in ("a", "b"):
        progress.text(word)
        time.sleep(0.11)
        step.advance()
""",
            stdout=file.fileno(),
        )
    assert (tmp_path / "out.txt").read_text() == "ab"
    assert received.count("\n") == 1 and "1 of 2 (50%)" in received


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "dumb")
    with Progress().step("load"):
        pass
    assert "\x1b" not in stream.getvalue()


def test_a_notebook_shows_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress()
    with progress.step("load " + "x" * 100, total=2, unit="tensors") as step:
        step.advance(2)
    live, *_, last = stream.getvalue().replace("\n", "\r").split("\r")[2:]
    assert live == "load " + "x" * 74 and last == ""
    assert "\x1b" not in stream.getvalue() and stream.getvalue().count("\n") == 1


def test_who_has_configured_logging_sees_lines_once(capsys: pytest.CaptureFixture[str]) -> None:
    package = logging.getLogger("lite_runner")
    handler = logging.StreamHandler(sys.stderr)
    package.addHandler(handler)
    try:
        package.setLevel(logging.INFO)
        Progress().note("once")
        handler.setLevel(logging.WARNING)
        Progress().note("never")
    finally:
        package.removeHandler(handler)
        package.setLevel(logging.NOTSET)
    assert capsys.readouterr().err == "once\n"


def test_a_level_that_a_program_sets_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    package = logging.getLogger("lite_runner")
    package.setLevel(logging.WARNING)
    try:
        Progress().note("never")
    finally:
        package.setLevel(logging.NOTSET)
    Progress().note("as ever")
    assert capsys.readouterr().err == "as ever\n"


def test_standard_error_is_recognized_in_every_wrapper(capsys: pytest.CaptureFixture[str]) -> None:
    package = logging.getLogger("lite_runner")
    with open(2, "w", closefd=False) as again:
        handler = logging.StreamHandler(again)
        handler.setLevel(logging.WARNING)
        package.addHandler(handler)
        try:
            Progress().note("never")
        finally:
            package.removeHandler(handler)
    assert capsys.readouterr().err == ""


def test_names_forge_no_line_and_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "x\nid=0\x1b[2J\x9b\u202e\r\u2028y"
    progress = Progress()
    with progress.step(name):
        progress.event("request", {"path": name, "status": 404})
    progress.error(f"error: {name}")
    progress.error("ValueError", ValueError(name))
    captured = capsys.readouterr().err
    assert all(one.isprintable() for one in captured.replace("\n", ""))
    step, event, done, *_ = captured.splitlines()
    assert step.startswith(r"x\nid=0\x1b[2J\x9b\u202e\r\u2028y") and done.startswith(r"x\nid=0")
    found = re.fullmatch(r'path=("[^"]*") status=404', event)
    assert found and json.loads(found[1]) == name
    progress.configure(1, "json")
    try:
        progress.event("request", {"path": name})
    finally:
        progress.configure(1)
    captured = capsys.readouterr().err
    assert captured.rstrip("\n").isprintable() and json.loads(captured)["path"] == name


def test_line_breaks_of_names_are_told_apart_from_ours(capsys: pytest.CaptureFixture[str]) -> None:
    name, shown = "a\nerror: b\x1b[2J\n c", r"a\nerror: b\x1b[2J\n c"
    error = ConfigError.of([f"{name}: missing", "load: wrong"])
    assert str(error) == f"2 errors in the config:\n  - {shown}: missing\n  - load: wrong"
    assert str(ArtifactError(f"{name}: broken", name)) == f"{shown}: broken\n  -> {shown}"
    progress = Progress()
    progress.note(f"note: {name}\n  -> {name}")
    progress.error(f"error: {name}\n  -> {name}")
    lines = [f"{kind}: {shown}\n  -> {shown}\n" for kind in ("note", "error")]
    assert capsys.readouterr().err == "".join(lines)
    assert align({"output": name}) == [f"output        {shown}"]


def test_field_values_are_quoted_unless_they_are_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"a": "/v1/é=b", "b": "two words", "c": 'a"b', "d": "", "e": "a\\nb", "f": 0.5}
    Progress().event("request", fields)
    line = capsys.readouterr().err.rstrip("\n")
    assert line == r'a=/v1/é=b b="two words" c="a\"b" d="" e="a\\nb" f=0.5'
