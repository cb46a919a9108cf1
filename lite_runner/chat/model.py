"""What answers in a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lite_runner.records import dataclass

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
        """The answer to the last of `messages`, told as it comes; `options` by their config keys,
        where they differ from the run's. Ctrl-C ends it with what there is. Raises ContextFull,
        RunnerError."""
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...
