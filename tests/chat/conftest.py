"""A model that answers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lite_runner.chat.conversation import Answer, ContextFull, Conversation, Messages
from tests.serving.conftest import start as start  # the fixture


class Echo:
    """Repeats the last message; `room`: characters of all messages that it takes."""

    def __init__(self, room: int = 10_000) -> None:
        self.name, self.adapters = "echo", ("pirate", "french")
        self.room, self.asked = room, list[tuple[Any, ...]]()

    def answer(
        self,
        messages: Messages,
        options: Mapping[str, Any],
        adapter: str | None,
        on_text: Callable[[str], None],
    ) -> Answer:
        characters = sum(len(message["content"]) for message in messages)
        if characters > self.room:
            raise ContextFull
        self.asked.append(([*messages], dict(options), adapter))
        text = messages[-1]["content"].upper()
        for piece in text:
            on_text(piece)
        return Answer(text, "stop", characters, 0, len(text), 0.5, 1.5)

    def close(self) -> None: ...


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(Echo(), system="be brief")
