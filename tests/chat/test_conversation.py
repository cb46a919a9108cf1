"""Turns, the context, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lite_runner.chat.conversation import Conversation, Turn
from lite_runner.errors import ConfigError
from tests.chat.conftest import Echo


def test_turns_are_the_models_prompt(conversation: Conversation) -> None:
    pieces: list[str] = []
    conversation.ask("one", pieces.append)
    answer, dropped = conversation.ask("two", lambda _: None)
    assert "".join(pieces) == "ONE" and (answer.text, dropped) == ("TWO", 0)
    asked, _, _ = conversation.model.asked[-1]
    assert [(one["role"], one["content"]) for one in asked] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "ONE"),
        ("user", "two"),
    ]


def test_the_oldest_turns_make_room() -> None:
    conversation = Conversation(Echo(room=20), system="sys")
    assert conversation.ask("aaaa", lambda _: None)[1] == 0
    assert conversation.ask("bbbb", lambda _: None)[1] == 0
    answer, dropped = conversation.ask("cccc", lambda _: None)
    assert (answer.text, dropped) == ("CCCC", 1)
    assert conversation.turns == [Turn("bbbb", "BBBB"), Turn("cccc", "CCCC")]
    with pytest.raises(ConfigError, match="does not fit the model's context"):
        conversation.ask("x" * 30, lambda _: None)


def test_a_file_has_it_all(conversation: Conversation, tmp_path: Path) -> None:
    conversation.ask("ünïcode", lambda _: None)
    conversation.save(tmp_path / "a.json")
    before = conversation.messages()
    with pytest.raises(ConfigError, match="File exists"):
        conversation.save(tmp_path / "a.json")
    other = Conversation(Echo())
    other.load(tmp_path / "a.json")
    assert other.messages() == before


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "x",
        [1],
        [{"role": "user"}],
        [{"role": "user", "content": "x"}],
        [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}],
        [{"role": "ghost", "content": "x"}],
        [{"role": "user", "content": [1]}, {"role": "assistant", "content": "x"}],
    ],
    ids=str,
)
def test_other_files_change_nothing(
    conversation: Conversation, tmp_path: Path, messages: object
) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"messages": messages}))
    conversation.ask("one", lambda _: None)
    before = conversation.messages()
    with pytest.raises(ConfigError):
        conversation.load(tmp_path / "a.json")
    with pytest.raises(ConfigError):
        conversation.load(tmp_path / "missing.json")
    assert conversation.messages() == before
