"""/v1/responses, by OpenAI's own package and its types."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from lite_runner.serving import state
from lite_runner.serving.responses import MessageItem, ResponsesRequest, chat_request
from lite_runner.serving.state import Responses, Stored
from tests.serving.conftest import Served, Start, tokenizer_with_chat
from tests.serving.test_app import call
from tests.serving.test_messages import TEMPLATE
from tests.serving.test_schema import sent, unknown
from tests.serving.test_thinking import MARKS, SWITCHED, says

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
ASKED: dict[str, Any] = {"model": "base", "temperature": 0, "input": "hi"}
EVENT: TypeAdapter[BaseModel] = TypeAdapter(ResponseStreamEvent)
WRITTEN = '<tool_call>{"name": "clock", "arguments": {"a": [1]}}</tool_call>'

# What OpenAI sends, too, and the schema of Open Responses has.
MORE = {"store", "frequency_penalty", "presence_penalty"}


def start_with(start: Start, text: str, template: str = TEMPLATE, **more: Any) -> Served:
    tokenizer = tokenizer_with_chat(template, MARKS)
    return start(says(text, tokenizer), tokenizer=tokenizer, **more)


def events_of(content: bytes) -> Iterator[dict[str, Any]]:
    """Events as they are on the wire, each of a published type and in its order."""
    for number, one in enumerate(content.decode().strip().split("\n\n")):
        name, data = one.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        found = EVENT.validate_python(event)
        assert found.type == event["type"] and set(unknown(found)) <= {*MORE, "bytes"}, event
        yield event


def asked(served: Served, **more: Any) -> dict[str, Any]:
    """The response, which equals that of its events."""
    content = sent(served, PATH, {**ASKED, **more})
    parsed = Response.model_validate_json(content, strict=True)
    assert set(unknown(parsed)) == MORE, content
    whole: dict[str, Any] = json.loads(content)
    first, second, *changes, last = events_of(sent(served, PATH, {**ASKED, **more, "stream": True}))
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"]["output"] == [] and first["response"]["status"] == "in_progress"
    items: list[Any] = []
    for event in changes:
        kind = event["type"].removeprefix("response.")
        place = event["output_index"]
        if kind == "output_item.added":
            assert place == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind == "output_item.done":
            assert items[place]["id"] == event["item"]["id"]
            same = {"status": event["item"]["status"]}
            for item in (items[place], event["item"]):
                for part in item.get("content", ()):
                    part.pop("logprobs", None)
            assert items[place] | same == event["item"]
        elif kind == "content_part.added":
            items[place]["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            items[place]["arguments"] += event["delta"]
        elif kind.endswith(".delta"):
            items[place]["content"][0]["text"] += event["delta"]
        else:
            item = items[event["output_index"]]
            content = item["arguments"] if "arguments" in item else item["content"][0]["text"]
            if kind != "content_part.done":
                assert event.get("text", event.get("arguments")) == content
        if kind not in ("output_item.added", "output_item.done"):
            assert event["item_id"] == items[place]["id"]
    response = last["response"]
    assert last["type"] == f"response.{response['status']}"
    same = {"id": 0, "created_at": 0, "completed_at": 0, "usage": 0, "output": 0}
    assert response | same == whole | same
    assert plain(response["output"]) == plain(whole["output"])
    cached = response["usage"].pop("input_tokens_details")["cached_tokens"]
    assert cached and response["usage"].items() <= whole["usage"].items()
    return whole


def plain(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for item in output:
        assert item["id"][:2] in ("rs", "ms", "fc")
    return [{**item, "id": 0, "call_id": 0} for item in output]


def test_text(start: Start) -> None:
    response = asked(start_with(start, "Hello."))
    (message,) = response["output"]
    assert (message["type"], message["role"], message["status"]) == (
        "message",
        "assistant",
        "completed",
    )
    part = {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}
    assert message["content"] == [part]
    assert response["status"] == "completed" and response["incomplete_details"] is None
    usage = response["usage"]
    assert usage["output_tokens"] == 7 and usage["total_tokens"] == usage["input_tokens"] + 7


def test_an_answer_that_is_cut(start: Start) -> None:
    response = asked(start_with(start, "one two"), max_output_tokens=3)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "one"


def test_reasoning_and_calls(start: Start) -> None:
    served = start_with(start, f"<think>Hm.</think>I look.\n{WRITTEN}\n{WRITTEN}")
    response = asked(served, tools=[TOOL])
    reasoning, message, *calls = response["output"]
    assert reasoning["type"] == "reasoning" and reasoning["summary"] == []
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I look."
    assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [
        ("clock", {"a": [1]})
    ] * 2
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    chosen = {"type": "function", "name": "clock"}
    one = asked(served, tools=[TOOL], tool_choice=chosen, parallel_tool_calls=False)
    assert [item["type"] for item in one["output"]].count("function_call") == 1
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [chosen]}
    tools = [TOOL, {**TOOL, "name": "other"}]
    assert asked(served, tools=tools, tool_choice=allowed)["tools"][1]["name"] == "other"


def test_items_go_to_the_template(start: Start) -> None:
    served = start_with(start, "Hello.")
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "reasoning",
            "id": "rs_2",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "1", "name": "clock", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "2", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "noon"},
        {"type": "function_call_output", "call_id": "2", "output": "noon"},
        {"type": "message", "role": "user", "content": "Well?"},
    ]
    given = {**ASKED, "input": items, "instructions": "Be brief.", "tools": [TOOL]}
    body = ResponsesRequest.model_validate(given)
    assert not isinstance(body.input, str)
    turns = [one.model_dump(exclude_none=True) for one in chat_request(body, body.input).messages]
    assert [one["role"] for one in turns] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert turns[0]["content"] == "Be brief.\n\nBe kind."
    assert turns[2]["reasoning"] == "Hm." and turns[2]["content"] == "I look."
    assert [one["id"] for one in turns[2]["tool_calls"]] == ["1", "2"]
    counted = json.loads(sent(served, f"{PATH}/input_tokens", given))
    assert counted["input_tokens"] == asked(served, **given)["usage"]["input_tokens"]


def test_options_have_the_meaning_of_chats() -> None:
    given = {
        **ASKED,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 3,
        "top_logprobs": 2,
        "reasoning": {"effort": "max", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    }
    item = MessageItem(role="user", content="hi")
    request = chat_request(ResponsesRequest.model_validate(given), [item])
    assert (request.temperature, request.top_p, request.max_completion_tokens) == (0.5, 0.9, 3)
    assert (request.logprobs, request.top_logprobs, request.reasoning_effort) == (True, 2, "xhigh")
    assert request.response_format is not None and request.response_format.json_schema is not None


def test_structured_text_and_log_probabilities(start: Start) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"const": "a"}, "strict": True}
    included = ["message.output_text.logprobs"]
    response = asked(start_with(start, '"a"'), text={"format": form}, include=included)
    part = response["output"][0]["content"][0]
    assert part["text"] == '"a"'
    assert "".join(one["token"] for one in part["logprobs"]) == '"a"'


def test_state(start: Start) -> None:
    served = start_with(start, "Hello.")
    client = served.client
    first = client.responses.create(model="base", input="one", temperature=0)
    assert client.responses.retrieve(first.id).output_text == first.output_text == "Hello."
    second = client.responses.create(
        model="base", input="two", temperature=0, previous_response_id=first.id
    )
    items = client.responses.input_items.list(second.id).data
    assert [one.content[0].text for one in items] == ["one", "Hello.", "two"]  # type: ignore
    again = [
        {"role": "user", "content": "one"},
        *(one.model_dump() for one in first.output),
        {"role": "user", "content": "two"},
    ]
    same = client.responses.input_tokens.count(model="base", input=again)  # type: ignore
    assert second.usage is not None and second.usage.input_tokens == same.input_tokens
    with client.responses.stream(model="base", input="one", temperature=0) as stream:
        streamed = [event.type for event in stream]
        last = stream.get_final_response()
    assert streamed[-1] == "response.completed" and last.output_text == "Hello."
    assert client.responses.retrieve(last.id).id == last.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="base", input="x", previous_response_id=first.id)
    assert raised.value.param == "previous_response_id"
    unstored = client.responses.create(model="base", input="one", store=False, temperature=0)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(unstored.id)


def test_an_answer_of_a_type(start: Start) -> None:
    class Word(BaseModel):
        word: str

    served = start_with(start, '{"word": "yes"}')
    answer = served.client.responses.parse(model="base", input="x", text_format=Word, temperature=0)
    assert answer.output_parsed == Word(word="yes")


def test_stored_responses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, one = Responses(), Stored(b"x" * 60, b"y" * 40)
    monkeypatch.setattr(state, "_MOST_BYTES", 250)
    for id in "abc":
        kept.add(id, one)
    assert [*kept._stored] == ["b", "c"]
    kept.get("b", None)
    kept.add("d", one)
    assert [*kept._stored] == ["b", "d"]
    monkeypatch.setattr(state, "_MOST_STORED", 1)
    kept.add("e", one)
    assert [*kept._stored] == ["e"]


def test_the_oldest_turns_are_left_out_where_the_context_ends(start: Start) -> None:
    tokenizer = tokenizer_with_chat("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    served = start(tokenizer=tokenizer)  # 256 tokens
    turns: list[dict[str, Any]] = [{"role": "system", "content": "sys"}]
    for number in range(6):
        turns.append({"role": "user", "content": f"{number}" * 50})
        turns.append({"role": "assistant", "content": "yes"})
    turns.append({"role": "user", "content": "last"})
    body = {**ASKED, "input": turns, "max_output_tokens": 20}
    status, _, content = call(served, PATH, body)
    error = json.loads(content)["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    response = json.loads(sent(served, PATH, {**body, "truncation": "auto"}))
    # [sys] and the last four turns of 52 and 5, [last]
    assert response["usage"]["input_tokens"] == 5 + 3 * 57 + 6 + 0
    alone = {**body, "input": "x" * 300, "truncation": "auto"}
    assert call(served, PATH, alone)[0] == 400
    # The error is the template's refusal of the rest, not that all of it was too long.
    few = "{% if messages | length < 14 %}{{ raise_exception('too few') }}{% endif %}"
    served = start(tokenizer=tokenizer_with_chat(f"{few}{tokenizer.chat_template}"))
    status, _, content = call(served, PATH, {**body, "truncation": "auto"})
    assert status == 400 and "too few" in json.loads(content)["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "message", "param"),
    [
        ({"top_n": 1}, "top_n: not supported", "top_n"),
        ({"background": True}, "background: not supported", "background"),
        ({"conversation": "x"}, "conversation: not supported", "conversation"),
        ({"input": []}, "input: List should have at least 1 item", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "expected message", "input.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "two tools have the name clock", "tools"),
        ({"include": ["file_search_call.results"]}, "not supported", "include"),
        ({"max_output_tokens": 5000}, "cannot hold", "input"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "text.format"),
    ],
)
def test_errors_name_its_fields(
    start: Start, changes: dict[str, Any], message: str, param: str
) -> None:
    served = start_with(start, "Hello.")
    status, _, content = call(served, PATH, {**ASKED, **changes})
    error = json.loads(content)["error"]
    assert status == 400 and error["type"] == "invalid_request_error"
    assert message in error["message"] and error["param"] == param


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
    *_, last = events_of(sent(served, PATH, {**ASKED, "stream": True}))
    assert last["type"] == "response.failed" and last["response"]["error"]["message"]


def test_replicas_keep_nothing(start: Start) -> None:
    served = start_with(start, "Hello.")
    served.server.settings = served.server.settings.__class__(
        **{**vars(served.server.settings), "engine": "ray"}
    )
    response = json.loads(sent(served, PATH, ASKED))
    assert response["store"] is False and call(served, f"{PATH}/{response['id']}")[0] == 404


def test_the_effort_switches_thinking(start: Start) -> None:
    served = start_with(start, "<think>Hm.</think>Yes.", SWITCHED)
    response = asked(served, reasoning={"effort": "none"})
    assert response["reasoning"] == {"effort": "none", "summary": None}


def test_a_response_is_that_of_the_key_that_made_it(start: Start) -> None:
    served = start_with(start, "Hello.", key=b"alice one\nbob two")
    alice, bob = (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)
        for key in ("one", "two")
    )
    first = alice.responses.create(model="base", input="a", temperature=0)
    for ask in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="no response"):
            ask(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: no response"):
        bob.responses.create(model="base", input="b", previous_response_id=first.id)
    again = alice.responses.create(model="base", input="b", previous_response_id=first.id)
    assert [alice.responses.retrieve(one.id).id for one in (first, again)] == [first.id, again.id]
    alice.responses.delete(first.id)


def test_a_write_that_breaks_off_leaves_the_former_responses(tmp_path: Path) -> None:
    path, kept = tmp_path / "kept", Responses()
    kept.add("resp_1", Stored(b'{"text":"\\n"}', b"[1]", "alice"))
    kept.save(path)
    kept.add("resp_2", Stored(b"{}", b"[]"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", raises_interrupt)
        kept.save(path)
    found = Responses()
    found.load(path)
    assert found.get("resp_1", "alice") == kept.get("resp_1", "alice")
    assert [state.is_stored(path, id) for id in ("resp_1", "resp_2")] == [True, False]
    kept.save(path)
    found.load(path)
    assert state.is_stored(path, "resp_2") and found.get("resp_2", None).items == b"[]"
    assert not state.is_stored(tmp_path / "none", "resp_1") and len([*tmp_path.iterdir()]) == 1


def raises_interrupt(_: int) -> None:
    raise KeyboardInterrupt
