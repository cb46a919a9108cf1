"""A conversation from the command line: through a pipe, and through a pseudo-terminal."""

from __future__ import annotations

import io
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

from lite_runner.app import main
from lite_runner.chat.conversation import Conversation
from lite_runner.chat.terminal import HELP, Exit, command, completions
from lite_runner.errors import ConfigError
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
    typed = "hello\nand\\\nmore\n/stats\n/exit\nnever\n"
    done = subprocess.run(
        [*CHAT, "max_new_tokens=5", "eos_token_id=[]"],
        cwd=folder,
        input=typed,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stderr
    assert "all: 2 answers, 10 tokens" in done.stderr
    kept = json.loads((folder / "outputs/latest/conversation.json").read_text())["messages"]
    assert [one["content"] for one in kept if one["role"] == "user"] == ["hello", "and\nmore"]


@pytest.mark.usefixtures("folder")
def test_the_first_answer_is_drawn_as_predict_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model=auto", "load_checkpoint=tiny", "do_sample=true", "temperature=5", "seed=3"]
    words += ["max_new_tokens=9", "eos_token_id=[]"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["run_mode=chat", *words]) == 0
    answer = json.loads(Path("outputs/latest/conversation.json").read_text())["messages"][-1]
    assert main([*words, "chat=true", "predict_data=hi"]) == 0
    (row,) = json.loads(Path("outputs/latest/result.json").read_text())["results"]
    assert answer == {"role": "assistant", "content": row["text"]}


@pytest.mark.usefixtures("folder")
def test_the_oldest_turns_go_where_the_context_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run_mode=chat", "model=auto", "load_checkpoint=tiny", "max_length=128"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nso?\n"))
    assert main([*words, "eos_token_id=[]"]) == 0  # the first answer fills it
    kept = json.loads(Path("outputs/latest/conversation.json").read_text())["messages"]
    assert [one["content"] for one in kept if one["role"] == "user"] == ["so?"]


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, command: list[str], cwd: Path, **more: str) -> None:
        self._own, other = pty.openpty()
        environment = os.environ | {"TERM": "dumb", "PROMPT_TOOLKIT_NO_CPR": "1"} | more
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
    opened = Terminal([*CHAT, "eos_token_id=[]", "max_new_tokens=4000"], folder)
    yield opened
    opened.end()


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


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colors_and_completion(folder: Path, no_color: str) -> None:
    terminal = Terminal([*CHAT, "max_new_tokens=4"], folder, TERM="xterm", NO_COLOR=no_color)
    try:
        terminal.until("Ctrl-D ends(.|\n)*> ")
        terminal.type("/sta\t")
        terminal.until("ts")  # the rest of /stats
        terminal.type("\r")
        terminal.until("no answer yet(.|\n)*> ")
        terminal.type("/nothing\r")
        terminal.until("error: no command /nothing")
    finally:
        terminal.end()
    green, dim, red = "\x1b[0;32m/", "\x1b[2mno answer yet", "\x1b[31merror: no command"
    assert [one in terminal.shown for one in (green, dim, red)] == [not no_color] * 3
    log = next((folder / "outputs").glob("*/*chat*/run.log")).read_text()
    assert "no answer yet" in log and "\x1b" not in log


def test_turns_are_forgotten(conversation: Conversation) -> None:
    for text in ("one", "two", "three"):
        conversation.ask(text, lambda _: None)
    assert command("/undo", conversation) == "the last turn is forgotten; 2 turns left"
    command("/reset", conversation)
    assert conversation.turns == [] and conversation.system == "be brief"
    assert command("/undo", conversation) == "there is no turn"
    command("/system you are a pirate", conversation)
    assert conversation.messages() == [{"role": "system", "content": "you are a pirate"}]
    command("/system", conversation)
    assert conversation.messages() == []


def test_options_are_checked_and_go_along(conversation: Conversation) -> None:
    command("/set temperature=0.5", conversation)
    command("/set max_new_tokens=7", conversation)
    command("/set stop=END", conversation)
    conversation.ask("one", lambda _: None)
    expected = {"temperature": 0.5, "max_new_tokens": 7, "stop": "END"}
    assert conversation.model.asked[-1][1] == expected
    assert "do_sample=False" in command("/set do_sample=false", conversation)
    command("/set temperature=0", conversation)  # typed last, it decides
    assert conversation.options.get("do_sample") is None
    command("/set stop=null", conversation)
    assert "stop" not in conversation.options
    for wrong in ("temperature=-1", "max_new_tokens=x", "top_k=1.5", "seed=1,2"):
        with pytest.raises(ConfigError):
            command(f"/set {wrong}", conversation)
    with pytest.raises(ConfigError, match="did you mean temperature"):
        command("/set temprature=1", conversation)


def test_adapters_by_name(conversation: Conversation) -> None:
    command("/adapter pirate", conversation)
    conversation.ask("one", lambda _: None)
    command("/adapter base", conversation)
    conversation.ask("two", lambda _: None)
    assert [asked[2] for asked in conversation.model.asked] == ["pirate", None]
    with pytest.raises(ConfigError, match="did you mean pirate"):
        command("/adapter pirat", conversation)


def test_files_and_figures(conversation: Conversation, tmp_path: Path) -> None:
    assert command("/stats", conversation) == "no answer yet"
    conversation.ask("four", lambda _: None)
    figures = command("/stats", conversation)
    assert "first token after 0.50 s, 4 tokens, 3.0 a second" in figures
    assert "all: 1 answer, 4 tokens" in figures
    command(f"/save {tmp_path}/a.json", conversation)
    command("/reset", conversation)
    assert "1 turn of " in command(f"/load {tmp_path}/a.json", conversation)
    with pytest.raises(ConfigError, match=r"nope\.json: cannot be read: No such file"):
        command("/load nope.json", conversation)
    for name in ("/save", "/load"):
        with pytest.raises(ConfigError, match="expected the name"):
            command(name, conversation)


def test_help_has_every_command_and_exit_ends(conversation: Conversation) -> None:
    from lite_runner.chat.terminal import _COMMANDS

    assert command("/help", conversation) == HELP
    assert all(name in HELP for name in _COMMANDS if name != "/quit")
    with pytest.raises(Exit):
        command("/exit", conversation)
    with pytest.raises(ConfigError, match="did you mean /reset"):
        command("/rest", conversation)


def test_completions(conversation: Conversation, tmp_path: Path) -> None:
    def of(line: str) -> list[str]:
        return list(completions(line, conversation))

    assert of("/s") == ["/system ", "/set ", "/save ", "/stats"]
    assert of("/set top_") == ["/set top_k=", "/set top_p="]
    assert of("/adapter ") == ["/adapter base", "/adapter pirate", "/adapter french"]
    (tmp_path / "said.json").touch()
    (tmp_path / "sayings").mkdir()
    assert of(f"/load {tmp_path}/sa") == [
        f"/load {tmp_path}/said.json",
        f"/load {tmp_path}/sayings/",
    ]
    for line in ("", "hello /s", "/reset ", "/none x", f"/load {tmp_path}/none/"):
        assert of(line) == []
