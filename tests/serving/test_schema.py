"""Answers as they are on the wire, against the types that OpenAI publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.serving.conftest import Served, Start, tokenizer_with_chat
from tests.serving.test_app import call
from tests.serving.test_tools import ASKED, SAID, TEMPLATES, says

# No echo: the first token's log-probability is null, as OpenAI's own is, and not in the schema.
PLAIN = {"prompt": "hello", "max_tokens": 5, "logprobs": 2, "n": 2, "seed": 1}
CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
    "logprobs": True,
    "top_logprobs": 2,
}
# What vLLM adds: the schema has models' four fields only.
OF_VLLM = {"root", "parent", "max_model_len"}


def unknown(found: BaseModel) -> Iterator[str]:
    """Fields that the published schema has not."""
    yield from found.model_extra or ()
    for value in found.__dict__.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                yield from unknown(one)


def check(kind: type[BaseModel], content: bytes | str) -> None:
    found = kind.model_validate_json(content, strict=True)
    assert set(unknown(found)) <= (OF_VLLM if kind is Model else set()), content
    required = {name for name, field in kind.model_fields.items() if field.is_required()}
    assert required <= json.loads(content).keys()


def sent(served: Served, path: str, body: dict[str, Any]) -> bytes:
    status, _, content = call(served, path, body)
    assert status == 200
    return content


@pytest.mark.parametrize("form", ["text", "tools"])
def test_answers(start: Start, form: str) -> None:
    if form == "text":
        served, chat = start(), CHAT
    else:
        tokenizer = tokenizer_with_chat(TEMPLATES["tags"])
        served = start(says(SAID[1][1], tokenizer), tokenizer=tokenizer)
        chat = {**ASKED, "temperature": 0}
    check(Completion, sent(served, "/v1/completions", PLAIN))
    check(ChatCompletion, sent(served, "/v1/chat/completions", chat))
    for path, body, kind in (
        ("/v1/completions", PLAIN, Completion),
        ("/v1/chat/completions", chat, ChatCompletionChunk),
    ):
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *events, end, rest = sent(served, path, body).decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "") and len(events) > 3
        for event in events:
            content = event.removeprefix("data: ")
            if kind is Completion:  # null as OpenAI's own is before the end, and not in the schema
                content = content.replace('"finish_reason":null', '"finish_reason":"stop"')
            check(kind, content)


def test_models(start: Start) -> None:
    listed = json.loads(call(start(), "/v1/models")[2])
    assert listed["object"] == "list"
    for card in listed["data"]:
        check(Model, json.dumps(card))
