"""Anthropic's protocol. tests/serving/test_clients.py speaks it by Anthropic's own package."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lite_runner.serving.messages import CountTokens, MessagesRequest, chat_request
from tests.serving.conftest import Served, Start, tokenizer_with_chat
from tests.serving.test_app import call
from tests.serving.test_schema import sent
from tests.serving.test_thinking import MARKS, SWITCHED, says

PATH = "/v1/messages"
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}{# <tool_call> #}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{{ m.tool_calls }}{% endfor %}" + SWITCHED[SWITCHED.index("{% if add") :]
)
TOOL = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
ASKED: dict[str, Any] = {
    "model": "base",
    "max_tokens": 300,
    "temperature": 0,
    "messages": [{"role": "user", "content": "hi"}],
}


def start_with(start: Start, text: str) -> Served:
    tokenizer = tokenizer_with_chat(TEMPLATE, MARKS)
    return start(says(text, tokenizer), tokenizer=tokenizer)


def asked(served: Served, **more: Any) -> dict[str, Any]:
    """The message, which equals that of its events."""
    whole: dict[str, Any] = json.loads(sent(served, PATH, {**ASKED, **more}))
    content = sent(served, PATH, {**ASKED, **more, "stream": True}).decode()
    events = []
    for one in content.strip().split("\n\n"):
        name, data = one.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    first, last = events[0], events[-1]
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    built, indices = first["message"], []
    written: dict[int, str] = {}  # arguments by block
    for event in events[1:-1]:
        if event["type"] == "content_block_start":
            indices.append(event["index"])
            built["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == indices[-1]
            block, delta = built["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                written[event["index"]] = written.get(event["index"], "") + delta["partial_json"]
            else:
                block[block["type"]] += delta[block["type"]]
        elif event["type"] == "content_block_stop":
            assert event["index"] == indices[-1]
            if event["index"] in written:
                built["content"][-1]["input"] = json.loads(written[event["index"]])
        else:
            built |= event["delta"] | {"usage": event["usage"]}
    kinds = [event["type"] for event in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(indices)
    assert indices == [*range(len(indices))] and built["id"].startswith("msg_")
    assert prompt_tokens(built) == prompt_tokens(whole)
    assert built["usage"]["cache_read_input_tokens"]
    same = {"id": 0, "usage": 0}
    for block in (*built["content"], *whole["content"]):
        assert block.pop("id", "call_").startswith("call_")
    assert built | same == whole | same
    return whole


def prompt_tokens(message: dict[str, Any]) -> int:
    usage: dict[str, int] = message["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_text(start: Start) -> None:
    message = asked(start_with(start, "Hello."))
    assert message["content"] == [{"type": "text", "text": "Hello.", "citations": None}]
    assert (message["role"], message["stop_reason"], message["stop_sequence"]) == (
        "assistant",
        "end_turn",
        None,
    )
    assert message["usage"]["output_tokens"] == 7


def test_stop_reasons(start: Start) -> None:
    served = start_with(start, "one two three")
    cut = asked(served, max_tokens=3)
    assert cut["stop_reason"] == "max_tokens" and cut["content"][0]["text"] == "one"
    stopped = asked(served, stop_sequences=["never", "three", "two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert stopped["content"][0]["text"] == "one "


def test_thinking_and_calls(start: Start) -> None:
    written = '<tool_call>{"name": "clock", "arguments": {"a": [1]}}</tool_call>'
    served = start_with(start, f"<think>Hm.</think>I look.\n{written}\n{written}")
    message = asked(served, tools=[TOOL])
    thinking, text, *calls = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "I look.", "citations": None}
    assert [(one["type"], one["name"], one["input"]) for one in calls] == [
        ("tool_use", "clock", {"a": [1]})
    ] * 2
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 5}
    single = {"type": "any", "disable_parallel_tool_use": True}
    one = asked(served, tools=[TOOL], tool_choice=single)
    assert [block["type"] for block in one["content"]].count("tool_use") == 1
    omitted = asked(served, thinking={"type": "adaptive", "display": "omitted"})
    assert omitted["content"][0]["type"] == "text"


def test_the_conversation_goes_to_the_template(start: Start) -> None:
    served = start_with(start, "Hello.")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "clock", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "noon"},
                {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    body = {"messages": messages, "system": system, "tools": [TOOL]}
    counted = json.loads(sent(served, f"{PATH}/count_tokens", body))["input_tokens"]
    tokenizer = served.tokenizer
    request = chat_request(CountTokens.model_validate(body), tokenizer)
    turns = [one.model_dump(exclude_none=True) for one in request.messages]
    assert [one["role"] for one in turns] == ["system", "user", "assistant", "tool", "user"]
    assert turns[0]["content"] == "Be brief.\nBe kind." and turns[1]["content"] == "a\nb"
    assert turns[2]["reasoning"] == "Hm." and turns[2]["content"] == "I look."
    assert turns[2]["tool_calls"][0]["function"] == {"name": "clock", "arguments": '{"a": 1}'}
    assert turns[3] == {"role": "tool", "tool_call_id": "1", "content": "noon"}
    usage = asked(served, **body)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted


def test_options_have_the_meaning_of_chats(start: Start) -> None:
    given = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "tool_choice": {"type": "tool", "name": "clock"},
        "tools": [TOOL],
        "output_config": {
            "effort": "max",
            "format": {"type": "json_schema", "schema": {"type": "object"}},
        },
    }
    body = MessagesRequest.model_validate({**ASKED, **given})
    tokenizer = tokenizer_with_chat(SWITCHED + "{{ reasoning_effort }}", MARKS)
    request = chat_request(body, tokenizer).model_dump(exclude_none=True, by_alias=True)
    assert (request["temperature"], request["top_k"], request["top_p"], request["max_tokens"]) == (
        0.5,
        4,
        0.9,
        3,
    )
    assert request["enable_thinking"] is True and request["thinking_token_budget"] == 5
    assert request["reasoning_effort"] == "xhigh"
    assert request["tool_choice"]["function"] == {"name": "clock"}
    assert request["response_format"]["json_schema"]["schema"] == {"type": "object"}
    form = {"type": "json_schema", "schema": {"const": "a"}}
    message = asked(start_with(start, '"a"'), output_config={"format": form})
    assert message["content"][0]["text"] == '"a"'


@pytest.mark.parametrize(
    ("changes", "status", "kind", "message"),
    [
        ({"model": "none"}, 404, "not_found_error", "no model 'none'"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: missing"),
        ({"top_n": 1}, 400, "invalid_request_error", "top_n: not supported"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "image",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "1", "name": "x", "input": {}}],
                    }
                ]
            },
            400,
            "invalid_request_error",
            "messages.0.content: tool_use is not in a message of the user",
        ),
    ],
)
def test_errors_have_its_form(
    start: Start, changes: dict[str, Any], status: int, kind: str, message: str
) -> None:
    found, _, content = call(start_with(start, "Hello."), PATH, {**ASKED, **changes})
    error = json.loads(content)
    assert (found, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert message in error["error"]["message"]


def test_the_key_may_be_in_its_header(start: Start) -> None:
    tokenizer = tokenizer_with_chat(TEMPLATE, MARKS)
    served = start(says("Hello.", tokenizer), tokenizer=tokenizer, key=b"secret")
    assert call(served, PATH, ASKED, x_api_key="secret")[0] == 200
    status, _, content = call(served, PATH, ASKED, x_api_key="wrong")
    assert status == 401 and json.loads(content)["error"]["type"] == "authentication_error"


def test_an_error_on_the_way_is_the_last_event(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = start_with(start, "Hello.")
    step = served.backend.forward

    def fails_later(rows: Any) -> Any:
        if len(served.backend.steps) > 2:
            raise RuntimeError("the memory is gone")
        return step(rows)

    monkeypatch.setattr(served.backend, "forward", fails_later)
    content = sent(served, PATH, {**ASKED, "stream": True}).decode().strip().split("\n\n")
    name, data = content[-1].split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: "))["type"] == "error"
