"""/v1/chat/completions, through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serving.conftest import Start, tokenizer_with_chat
from tests.serving.test_completions import alone, text_of

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
RENDERED = b"[system]be brief\n[user]hi\n[assistant]"


def test_the_template_makes_the_prompt(start: Start) -> None:
    answer = start().client.chat.completions.create(
        model="base", messages=MESSAGES, temperature=0, max_completion_tokens=12
    )
    expected = alone(RENDERED, max_new_tokens=12)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == text_of(expected)
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(RENDERED)


def test_parts_and_the_developer_are_as_templates_know_them(start: Start) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    answer = start().client.chat.completions.create(
        model="base", messages=messages, temperature=0, max_tokens=9
    )
    expected = alone(b"[system]x\n[user]h\ni\n[assistant]", max_new_tokens=9)
    assert answer.choices[0].message.content == text_of(expected)


def test_without_a_limit_it_may_fill_the_context(start: Start) -> None:
    asked = {"messages": MESSAGES, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = start().client.chat.completions.create(model="base", **asked)
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"


def test_a_stream_gives_the_role_once_and_the_whole(start: Start) -> None:
    client = start().client
    asked = {"model": "base", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    chunks = list(
        client.chat.completions.create(
            **asked,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == len(RENDERED)
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
    entries = [
        entry
        for chunk in chunks[:-1]
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert entries == whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == whole.choices[0].message.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_a_stream_begins_with_the_prompts_log_probabilities(start: Start) -> None:
    client = start().client
    asked = {"model": "base", "messages": MESSAGES, "temperature": 0, "max_tokens": 2}
    plain, scored = (
        list(client.chat.completions.create(**asked, stream=True, extra_body=extra))
        for extra in ({}, {"prompt_logprobs": 0})
    )
    assert not any(hasattr(chunk, "prompt_logprobs") for chunk in (*plain, *scored[1:]))
    first, *others = getattr(scored[0], "prompt_logprobs")  # noqa: B009  (vLLM's own)
    assert first is None and [list(one) for one in others] == [[str(id)] for id in RENDERED[1:]]


def test_several_answers(start: Start) -> None:
    answer = start().client.chat.completions.create(
        model="base", messages=MESSAGES, n=3, seed=1, max_tokens=10
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_the_next_turn_goes_on_from_the_first(start: Start) -> None:
    client = start().client
    first = client.chat.completions.create(
        model="base", messages=MESSAGES, temperature=0, max_tokens=20
    )
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and?"},
    ]
    second = client.chat.completions.create(model="base", messages=turns, max_tokens=1)
    assert second.usage.prompt_tokens_details.cached_tokens >= len(RENDERED) - len("[assistant]")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "ghost", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"prediction": {}}, "prediction"),
        ({"max_completion_tokens": 1000}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages.0.content.0.type",
        ),
    ],
    ids=str,
)
def test_unsupported_fields_are_refused_by_name(
    start: Start, changes: dict[str, object], param: str
) -> None:
    body = {"model": "base", "messages": MESSAGES, **changes}
    with pytest.raises(openai.BadRequestError) as raised:
        start().client.post("/chat/completions", body=body, cast_to=object)
    assert raised.value.body["param"] == param


def test_messages_that_the_template_refuses_are_named(start: Start) -> None:
    template = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    served = start(tokenizer=tokenizer_with_chat(template))
    asked: dict[str, Any] = {"messages": MESSAGES[:1] * 2}
    for url in (f"{served.url}/v1/chat/completions", f"{served.url}/tokenize"):
        with pytest.raises(openai.BadRequestError, match="one turn only") as raised:
            served.client.post(url, body=asked, cast_to=object)
        assert raised.value.body["param"] == "messages"
    with pytest.raises(openai.BadRequestError, match="no tokens") as raised:
        served.client.chat.completions.create(model="base", messages=MESSAGES[:1])
    assert raised.value.body["param"] == "messages"


def test_a_model_without_a_template_is_reported(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = start()
    monkeypatch.setattr(type(served.tokenizer), "has_chat_template", False)
    with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
        served.client.chat.completions.create(model="base", messages=MESSAGES)
