"""A conversation, its turns within the context of the model, and the interface of such a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

from lite_runner.config import did_you_mean, nearest
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import read_json_object

Messages = Sequence[Mapping[str, str]]  # {"role", "content"} each


@dataclass(frozen=True)
class Answer:
    """One answer, perhaps cut short."""

    text: str
    finish_reason: str  # "stop", "length" or "interrupted"
    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    tokens: int
    first_s: float  # seconds to the first token
    seconds: float  # to the last


class ContextFull(Exception):
    """The messages leave no room for an answer."""


class ChatModel(Protocol):
    """A model of this process, or one behind a server."""

    name: str
    adapters: tuple[str, ...]

    def answer(
        self,
        messages: Messages,
        options: Mapping[str, Any],
        adapter: str | None,
        on_text: Callable[[str], None],
    ) -> Answer:
        """The answer to the last of `messages`, streamed; `options`: those that differ from the
        run's, by config key. Ctrl-C ends it with the text so far. Raises ContextFull,
        RunnerError."""
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...


ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Turn:
    """A message and its answer."""

    user: str
    assistant: str


@dataclass
class Conversation:
    """The turns so far, and the options of the next answer."""

    model: ChatModel
    system: str = ""
    adapter: str | None = None  # None: the base model
    options: dict[str, Any] = field(default_factory=dict)  # by their config keys
    turns: list[Turn] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # all of this session, for statistics

    def messages(self) -> list[dict[str, str]]:
        """All messages, as chat templates take them."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        return messages

    def ask(self, text: str, on_text: Callable[[str], None]) -> tuple[Answer, int]:
        """The answer to `text`, and how many of the oldest turns were dropped since they no longer
        fit the context. Raises RunnerError; ConfigError where `text` alone does not fit."""
        dropped = 0
        while True:
            messages = [*self.messages(), {"role": "user", "content": text}]
            try:
                answer = self.model.answer(messages, self.options, self.adapter, on_text)
                break
            except ContextFull:
                if not self.turns:
                    raise ConfigError("the message does not fit the model's context") from None
                del self.turns[0]
                dropped += 1
        self.answers.append(answer)
        self.turns.append(Turn(text, answer.text))
        return answer, dropped

    def choose(self, name: str) -> None:
        """Answer with an adapter from now on. Raises ConfigError."""
        if name in ("", "base", "none"):
            self.adapter = None
        elif name in self.model.adapters:
            self.adapter = name
        else:
            near = did_you_mean(nearest(name, self.model.adapters))
            known = ", ".join(("base", *self.model.adapters))
            raise ConfigError(f"no adapter {name!r}{near}; available: {known}")

    def save(self, path: Path) -> None:
        """Write the messages to a new file. Raises ConfigError."""
        content = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=1)
        try:
            with path.expanduser().open("x", encoding="utf-8") as file:
                file.write(f"{content}\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None

    def load(self, path: Path) -> None:
        """Continue from the messages of a file. Raises ConfigError without changing anything."""
        try:
            self.system, self.turns = _turns(read_json_object(path.expanduser()).get("messages"))
        except ArtifactError as error:
            raise ConfigError(error.message) from None
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None


def _turns(messages: Any) -> tuple[str, list[Turn]]:
    """The system message, and the turns. Raises ValueError for other messages."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError("expected messages: a list of {role, content}")
    turns = [(one.get("role"), one.get("content")) for one in messages]
    if not all(role in ROLES and isinstance(content, str) for role, content in turns):
        raise ValueError(f"expected the roles {', '.join(ROLES)}, and a text as content of each")
    system = ""
    if turns and turns[0][0] == "system":
        system = turns.pop(0)[1]
    roles = [role for role, _ in turns]
    if roles != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("expected user and assistant in turn, behind at most one system message")
    texts = [str(content) for _, content in turns]
    return system, [Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)]
