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
from tests.serving.test_tools import ASKED, OUTPUTS, TEMPLATES, says

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
        tokenizer = tokenizer_with_chat(TEMPLATES["hermes"])
        served = start(says(OUTPUTS[1][1], tokenizer), tokenizer=tokenizer)
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


# Fields of OpenAI and vLLM, with what asks for nothing.
NEUTRAL: dict[str, list[Any]] = {
    "n": [1],
    "best_of": [1],
    "user": ["someone", ""],
    "metadata": [{}, {"a": "b"}],
    "safety_identifier": ["x"],
    "store": [False],
    "service_tier": ["auto", "default"],
    "stop": [[]],
    "stop_token_ids": [[]],
    "logit_bias": [{}],
    "stream": [False],
    "stream_options": [{}, {"include_usage": False}],
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0],
    "repetition_penalty": [1, 1.0],
    "length_penalty": [1, 1.0],
    "top_p": [1, 1.0],
    "top_k": [0, -1],
    "min_p": [0, 0.0],
    "min_tokens": [0],
    "priority": [0],
    "ignore_eos": [False],
    "use_beam_search": [False],
    "include_stop_str_in_output": [False],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "return_tokens_as_token_ids": [False],
    "return_token_ids": [False],
    "bad_words": [[]],
    "logits_processors": [[]],
    "guided_decoding_backend": ["auto"],
    "vllm_xargs": [{}],
    "response_format": [{"type": "text"}],
    "structured_outputs": [{}, {"json_object": False, "disable_any_whitespace": False}],
    "echo": [False],
}
NEUTRAL_COMPLETION = {"suffix": [""], "add_special_tokens": [True]}
NEUTRAL_CHAT: dict[str, list[Any]] = {
    "tools": [[]],
    "tool_choice": ["auto", "none"],
    "parallel_tool_calls": [True, False],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "logprobs": [False],
    "top_logprobs": [0],
    "modalities": [["text"]],
    "verbosity": ["medium"],
    "reasoning_effort": ["medium"],
    "include_reasoning": [True],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "add_special_tokens": [False],
    "documents": [[]],
    "chat_template_kwargs": [{}],
    "mm_processor_kwargs": [{}],
}
# Of which null is the only value that asks for nothing.
NULL = ("audio", "prediction", "web_search_options", "prompt_logprobs", "seed", "guided_grammar")
NULL = (*NULL, "truncate_prompt_tokens", "allowed_token_ids", "chat_template", "cache_salt")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_neutral_fields_are_accepted(start: Start, path: str) -> None:
    served, chats = start(), "chat" in path
    body: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    body["messages" if chats else "prompt"] = CHAT["messages"] if chats else "hello"

    def answer(**more: Any) -> Any:
        found = json.loads(sent(served, path, {**body, **more}))
        return found["choices"], found["usage"]["completion_tokens"]

    usual, fields = answer(), NEUTRAL | (NEUTRAL_CHAT if chats else NEUTRAL_COMPLETION)
    for name, values in fields.items():
        for value in (*values, None):
            assert answer(**{name: value}) == usual, (name, value)
    assert answer(**dict.fromkeys(NULL)) == usual
    assert answer(**{name: values[0] for name, values in fields.items()}) == usual


def test_unsupported_fields_are_refused_by_name(start: Start) -> None:
    served = start()
    for name, value in (
        ("best_of", 2),
        ("best_of", True),
        ("skip_special_tokens", False),
        ("length_penalty", 0.9),
        ("service_tier", "flex"),
        ("store", 0),
        ("functions", [{"name": "f"}]),
        ("prediction", {"type": "content"}),
    ):
        status, _, content = call(served, "/v1/chat/completions", {**CHAT, name: value})
        error = json.loads(content)["error"]
        assert (status, error["param"]) == (400, name), content
        assert error["code"] == "unsupported_parameter" and "not supported" in error["message"]


def test_an_earlier_answer_comes_back_whole(start: Start) -> None:
    served, asked = start(), CHAT["messages"]
    answer = served.client.chat.completions.create(model="base", messages=asked, max_tokens=3)
    message = answer.choices[0].message.model_dump()
    body = {"messages": [*asked, message | {"tool_calls": []}, *asked], "max_tokens": 3}
    sent(served, "/v1/chat/completions", body)


def test_models(start: Start) -> None:
    listed = json.loads(call(start(), "/v1/models")[2])
    assert listed["object"] == "list"
    for card in listed["data"]:
        check(Model, json.dumps(card))
