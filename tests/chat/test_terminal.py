"""A conversation from the command line: through a pipe, and through a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.serving.conftest import TEMPLATE
from tests.tokenizer_files import write_tokenizer

CHAT = [sys.executable, str(ROOT / "run_lite.py"), "run_mode=chat", "load_checkpoint=tiny"]
CHAT += ["model=auto"]


@pytest.fixture
def folder(write_tiny_llama: Callable[..., Path], tmp_path: Path) -> Path:
    """With the folder tiny: a model, a tokenizer of bytes and a chat template."""
    from lite_runner.text.tokenizer import byte_tokenizer

    tiny = write_tiny_llama("tiny", {"seq_length": 4096})
    write_tokenizer(byte_tokenizer().with_special(chat_template=TEMPLATE), tiny)
    return tmp_path


def test_lines_of_a_pipe_are_messages(folder: Path) -> None:
    said = "hello\nand\\\nmore\n/stats\n/exit\nnever\n"
    done = subprocess.run(
        [*CHAT, "max_new_tokens=5", "eos_token_id=[]"],
        cwd=folder,
        input=said,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stderr
    assert "all: 2 answers, 10 tokens" in done.stderr
    kept = json.loads((folder / "outputs/latest/conversation.json").read_text())["messages"]
    assert [one["content"] for one in kept if one["role"] == "user"] == ["hello", "and\nmore"]


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self._own, other = pty.openpty()
        environment = os.environ | {"TERM": "dumb", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )
        os.close(other)
        self.shown = ""

    def until(self, pattern: str) -> None:
        """Read until the screen's new part matches."""
        start = len(self.shown)
        while not re.search(pattern, self.shown[start:]):
            assert select.select([self._own], [], [], 300)[0], self.shown
            self.shown += os.read(self._own, 65536).decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.fixture
def terminal(folder: Path) -> Iterator[Terminal]:
    made = Terminal([*CHAT, "eos_token_id=[]", "max_new_tokens=4000"], folder)
    yield made
    made.end()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, folder: Path) -> None:
    terminal.until("Ctrl-D ends(.|\n)*> ")
    terminal.type("hello\r")
    terminal.until("hello")
    terminal.until(r"[^\r\n]{20}")  # some of the answer
    terminal.type("\x03")
    terminal.until("interrupted(.|\n)*> ")
    terminal.type("/set max_new_tokens=3\r")
    terminal.until("max_new_tokens=3\\D(.|\n)*> ")
    terminal.type("again\r")
    terminal.until("cut by max_new_tokens(.|\n)*> ")
    terminal.type("\x03")
    terminal.until("Ctrl-D or /exit ends(.|\n)*> ")
    while terminal.process.poll() is None:  # what is typed while a prompt begins may be lost
        terminal.type("\x04")
        time.sleep(0.2)
    assert terminal.process.returncode == 0
    kept = json.loads((folder / "outputs/latest/conversation.json").read_text())["messages"]
    assert [one["role"] for one in kept] == ["user", "assistant"] * 2
    assert len(kept[1]["content"]) > 10
