"""What begins with a slash."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.chat.commands import HELP, Exit, command
from lite_runner.chat.conversation import Conversation
from lite_runner.errors import ConfigError


def test_turns_are_forgotten(conversation: Conversation) -> None:
    for text in ("one", "two", "three"):
        conversation.ask(text, lambda _: None)
    assert command("/undo", conversation) == "the last turn is forgotten; 2 are left"
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
    expected = {"temperature": 0.5, "do_sample": True, "max_new_tokens": 7, "stop": "END"}
    assert conversation.model.asked[-1][1] == expected
    told = command("/set temperature=0", conversation)
    assert "do_sample=False" in told
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
    assert "first token after 0.50 s, 4 tokens, 3.0 a second" in command("/stats", conversation)
    command(f"/save {tmp_path}/a.json", conversation)
    command("/reset", conversation)
    assert "1 turns" in command(f"/load {tmp_path}/a.json", conversation)
    with pytest.raises(ConfigError, match=r"nope\.json: cannot be read: No such file"):
        command("/load nope.json", conversation)
    for name in ("/save", "/load"):
        with pytest.raises(ConfigError, match="expected the name"):
            command(name, conversation)


def test_help_has_every_command_and_exit_ends(conversation: Conversation) -> None:
    from lite_runner.chat.commands import _COMMANDS

    assert command("/help", conversation) == HELP
    assert all(name in HELP for name in _COMMANDS if name != "/quit")
    with pytest.raises(Exit):
        command("/exit", conversation)
    with pytest.raises(ConfigError, match="did you mean /reset"):
        command("/rest", conversation)
