"""The chats of ChatGLM2 and ChatGLM3, whose tags are tokens that no text spells."""

# ruff: noqa: RUF001  (the rounds of ChatGLM2 have full-width colons)
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lite_runner.errors import ConfigError

ChatForm = Literal["chatglm2", "chatglm3"]
PREFIX = ("[gMASK]", "sop")  # starts every prompt
# The words before a list of tools that ChatGLM3 was trained with.
_TOOLS = (
    "Answer the following questions as best as you can. You have access to the following tools:"
)
ROLES = ("system", "user", "assistant", "observation")


class Tag(str):
    """A special token by name; other parts of a chat are texts, each encoded separately."""


def role_tag(role: str) -> Tag:
    return Tag(f"<|{role}|>")


def parts(
    form: ChatForm,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Iterator[str]:
    """A chat of {"role", "content"} as tags and texts; `tools` as OpenAI's protocol has them.
    Raises ConfigError for roles, or an order of them, that the model does not know."""
    yield from map(Tag, PREFIX)
    if form == "chatglm2":
        if tools:
            raise ConfigError("chat: a ChatGLM2 knows no tools")
        yield "".join(_rounds(messages, add_generation_prompt))
        return
    if tools:
        messages = _with_tools(messages, tools)
    for message in messages:
        role = message["role"]
        if role not in ROLES:
            expected = ", ".join(ROLES)
            raise ConfigError(f"chat: a message has role {role!r}, expected one of {expected}")
        yield role_tag(role)
        yield f"{message.get('metadata') or ''}\n"
        yield message["content"]
    if add_generation_prompt:
        yield role_tag("assistant")


def _with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages with the functions appended to the system message, which is the first."""
    functions = [tool.get("function", tool) for tool in tools]
    listed = json.dumps(functions, indent=4, ensure_ascii=False)
    prompt = f"{_TOOLS}\n{listed}"
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n{prompt}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _rounds(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> Iterator[str]:
    for index, message in enumerate(messages):
        expected = ("user", "assistant")[index % 2]
        if message["role"] != expected:
            raise ConfigError(
                f"chat: message {index} has role {message['role']!r}, expected {expected}: the"
                " user and the assistant of a ChatGLM2 take turns, and it has no system"
            )
        if expected == "user":
            yield f"[Round {index // 2 + 1}]\n\n问：{message['content']}\n\n答："
        else:
            yield f"{message['content']}\n\n"
    if add_generation_prompt and len(messages) % 2 == 0:
        raise ConfigError("chat: the last message is the assistant's, expected one of the user")
