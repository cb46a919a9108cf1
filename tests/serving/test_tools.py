"""Tools: given to the template, calls read from answers, and forced by a grammar."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel, Field, TypeAdapter

from lite_runner.serving.options import ToolParser as Name
from lite_runner.serving.tool_code import TURN_TAG
from lite_runner.serving.tool_formats import FORMATS
from lite_runner.serving.tool_parsers import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    MARKS,
)
from lite_runner.text.tokenizer import Tokenizer
from tests.chatglm_folders import write_chatglm3
from tests.each import each
from tests.generation.mock import MockBackend
from tests.serving.conftest import (
    END,
    Launch,
    Served,
    Start,
    tokenizer_of_chatglm3,
    tokenizer_with_chat,
)
from tests.serving.test_sampling import chaos
from tests.serving.test_tool_parsers import qwen3_call, qwen3_pair
from tests.serving.tool_reading import Allowed, read, read_however_cut

BODY = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.metadata }}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{{ m.tool_call_id }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEMPLATES = {
    "hermes": BODY + "{# <tool_call> #}",
    "llama3_json": BODY + "{# <|start_header_id|> #}",
    "mistral": BODY + "{# [TOOL_CALLS] #}",
    "glm4": BODY + "{# [gMASK] <|observation|> #}",
    "glm45": BODY + "{# [gMASK] <|observation|> <tool_call> <arg_key> #}",
    "qwen3_coder": BODY + "{# <tool_call> <function= #}",
    "granite": BODY + "{# <|tool_call|> <|start_of_role|> #}",
    "phi4": BODY + "{# functools[ #}",
    "kimi_k2": BODY + "{# <|tool_call_begin|> #}",
    "deepseek_v3": BODY + f"{{# {DEEPSEEK_CALL} ```json #}}",
    "deepseek_v31": BODY + f"{{# {DEEPSEEK_CALL} #}}",
    "harmony": BODY + "{# <|channel|> to=functions. #}",
    "gemma": BODY + "{# <start_function_call> #}",
    "gemma4": BODY + "{# <|tool_call>call: #}",
    "seed_oss": BODY + "{# <seed:tool_call> #}",
    "nemotron_json": BODY + "{# <TOOLCALL> #}",
    "hunyuan_a13b": BODY + "{# <tool_calls>[{ #}",
    "cohere": BODY + "{# <|START_ACTION|> #}",
    "pythonic": BODY + "{# [look_up( #}",
    "llama4_pythonic": BODY + "{# <|header_start|> #}",
}
FORMS = [*TEMPLATES, "chatglm3"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASKED: dict[str, Any] = {
    "model": "base",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [WEATHER, CLOCK],
}


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


def tokenizer_of(form: str) -> Tokenizer:
    return tokenizer_of_chatglm3() if form == "chatglm3" else tokenizer_with_chat(TEMPLATES[form])


def says(text: str, tokenizer: Tokenizer) -> MockBackend:
    """A model that always answers the same, in one turn or several."""
    tag = tokenizer.id_of(TURN_TAG)
    head = [*b"[assistant]"] if tag is None else [tag]
    script = [*text.encode(), END]
    if tag is not None:
        first, *turns = text.split(TURN_TAG)
        script = [*first.encode(), *(id for turn in turns for id in (tag, *turn.encode())), END]

    def logits(history: list[int], _: int) -> NDArray[np.float32]:
        scores = np.zeros(tokenizer.vocab_size, np.float32)
        begins = [at for at in range(len(history)) if history[at : at + len(head)] == head]
        position = len(history) - (begins[0] + len(head) if begins else 0)
        scores[script[min(position, len(script) - 1)]] = 50
        return scores

    return MockBackend(logits, 4, 4096, 4)


# What a model says, the text and the calls in it.
OUTPUTS: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", "no <tool, sorry", "no <tool, sorry", []),
    (
        "hermes",
        'Sure:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n',
        "Sure:",
        [("get_weather", {"city": "Oslo"}), ("clock", {})],
    ),
    ("hermes", '<tool_call>{"name": "clock", "arguments": {}}', "", [("clock", {})]),
    ("hermes", "a <tool_call>nothing</tool_call> b", "a <tool_call>nothing</tool_call> b", []),
    ("llama3_json", '{"name": "clock", "parameters": {"a": "ü;"}}', "", [("clock", {"a": "ü;"})]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "x", "parameters": {"b": 1}}',
        "",
        [("clock", {}), ("x", {"b": 1})],
    ),
    ("llama3_json", '{"temperature": 3}', '{"temperature": 3}', []),
    ("llama3_json", "It is {warm}.", "It is {warm}.", []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "x", "arguments": {"b": [1]}}]',
        "",
        [("clock", {}), ("x", {"b": [1]})],
    ),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]clock{}',
        "",
        [("get_weather", {"city": "Rome"}), ("clock", {})],
    ),
    ("mistral", "[TOOL] [TOOL_CALLS][]", "[TOOL] [TOOL_CALLS][]", []),
    ("glm4", 'get_weather\n{"city": "Rome"}', "", [("get_weather", {"city": "Rome"})]),
    ("glm4", "get_weather is a tool.", "get_weather is a tool.", []),
    ("glm4", "clock\nis a tool.", "clock\nis a tool.", []),
    (
        "glm45",
        "Sure:\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>clock\n</tool_call>\n",
        "Sure:",
        [("get_weather", {"city": "Oslo", "days": 3}), ("clock", {})],
    ),
    ("glm45", "a <tool_call> no call</tool_call> b", "a <tool_call> no call</tool_call> b", []),
    (
        "chatglm3",
        " get_weather\n ```python\ntool_call(city='Oslo', days=3)\n```",
        "",
        [("get_weather", {"city": "Oslo", "days": 3})],
    ),
    (
        "chatglm3",
        f"\n Let me see.{TURN_TAG} clock\n ```python\ntool_call()\n```{TURN_TAG}\n So it is.",
        "\n Let me see.\n So it is.",
        [("clock", {})],
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "clock", "arguments": {"a": "]}"}},'
        ' {"name": "clock", "arguments": {}}]',
        "",
        [("clock", {"a": "]}"}), ("clock", {})],
    ),
    (
        "phi4",
        'I look. functools[{"name": "clock", "arguments": {"a": [{}]}}]',
        "I look.",
        [("clock", {"a": [{}]})],
    ),
    (
        "kimi_k2",
        "So:<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.clock:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "So:",
        [("clock", {"a": 1}), ("clock", {})],
    ),
    (
        "deepseek_v3",
        f"{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}function{DEEPSEEK_SEP}clock\n```json\n"
        f'{{"a": "```"}}\n```{DEEPSEEK_CALL_END}\n{DEEPSEEK_CALL}function{DEEPSEEK_SEP}clock\n'
        f"```json\n{{}}\n```{DEEPSEEK_CALL_END}{DEEPSEEK_END}",
        "",
        [("clock", {"a": "```"}), ("clock", {})],
    ),
    (
        "deepseek_v31",
        f"{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}clock{DEEPSEEK_SEP}{{}}{DEEPSEEK_CALL_END}{DEEPSEEK_END}",
        "",
        [("clock", {})],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
        [("clock", {"a": 1})],
    ),
    (
        "gemma",
        "<start_function_call>call:clock{a:<escape>it's {x:1}<escape>,b:[1,{c:<escape><escape>}]}"
        "<end_function_call>",
        "",
        [("clock", {"a": "it's {x:1}", "b": [1, {"c": ""}]})],
    ),
    (  # marks in texts, in both forms
        "gemma",
        '<start_function_call>call:clock{a:[{"b":"\\"<escape> <end_function_call>"}],'
        'c:<escape>"<end_function_call><escape>}<end_function_call>',
        "",
        [("clock", {"a": [{"b": '"<escape> <end_function_call>'}], "c": '"<end_function_call>'})],
    ),
    (
        "pythonic",
        "[clock(a='x', b=[1]), clock()]",
        "",
        [("clock", {"a": "x", "b": [1]}), ("clock", {})],
    ),
    ("pythonic", "[1] is a clock(", "[1] is a clock(", []),
    ("pythonic", "[clock is", "[clock is", []),
    (
        "llama4_pythonic",
        "<|python_start|>[clock(a=None)]<|python_end|>",
        "",
        [("clock", {"a": None})],
    ),
    ("chatglm3", "\n clock\n is a tool.", "\n clock\n is a tool.", []),
]


@each(("form", "output", "text", "calls"), OUTPUTS)
def test_calls_are_read_however_the_text_is_cut(
    form: Any, output: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    tools = {"get_weather": WEATHER["function"]["parameters"], "clock": {}}
    assert read_however_cut(form, output, tools) == (text, calls)


@pytest.mark.parametrize(("form", "output", "text", "calls"), OUTPUTS)
def test_an_answer_and_its_stream(
    start: Start, form: str, output: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    tokenizer = tokenizer_of(form)
    client = start(says(output, tokenizer), tokenizer=tokenizer).client
    answer = client.chat.completions.create(**ASKED, temperature=0)
    (choice,) = answer.choices
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert (choice.message.content or "") == text
    tool_calls = choice.message.tool_calls or []
    assert [(one.function.name, json.loads(one.function.arguments)) for one in tool_calls] == calls
    assert len({one.id for one in tool_calls}) == len(tool_calls)
    with client.chat.completions.stream(**ASKED, temperature=0) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == choice.finish_reason
    assert (streamed.message.content or "") == text
    found = streamed.message.tool_calls or []
    assert [one.function.model_dump(include={"name", "arguments"}) for one in found] == [
        one.function.model_dump(include={"name", "arguments"}) for one in tool_calls
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_forced_for_every_model(start: Start, form: str) -> None:
    tokenizer = tokenizer_of(form)
    client = start(any_of(tokenizer), tokenizer=tokenizer).client
    named = {"type": "function", "function": {"name": "get_weather"}}
    checked = TypeAdapter(Weather)
    answer = client.chat.completions.create(**ASKED, tool_choice=named, seed=0, temperature=2)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert call.function.name == "get_weather"
    checked.validate_json(call.function.arguments, strict=True)
    names = set()
    for seed in range(9):
        answer = client.chat.completions.create(
            **ASKED, tool_choice="required", seed=seed, temperature=2, parallel_tool_calls=False
        )
        (call,) = answer.choices[0].message.tool_calls
        names.add(call.function.name)
        if call.function.name == "clock":
            assert json.loads(call.function.arguments) == {}
        else:
            checked.validate_json(call.function.arguments, strict=True)
        if len(names) == 2:
            break
    assert names == {"get_weather", "clock"}


@pytest.mark.parametrize(
    ("form", "output"),
    [
        ("hermes", '<tool_call>\n{"name": "heat", "arguments": {"to": NUMBER}}\n</tool_call>'),
        ("gemma", "<start_function_call>call:heat{to:NUMBER}<end_function_call>"),
        ("qwen3_coder", qwen3_call(qwen3_pair("to", "NUMBER"), name="heat")),
    ],
)
def test_a_forced_call_of_no_usable_number_is_an_error(
    start: Start, form: str, output: str
) -> None:
    """JSON lets a number be beyond all floats, of which most of its readers make infinity."""
    heats = {"type": "object", "properties": {"to": {"type": "number"}}, "required": ["to"]}
    tool = {"type": "function", "function": {"name": "heat", "parameters": heats}}
    asked = {**ASKED, "tools": [tool], "temperature": 0, "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    tokenizer = tokenizer_of(form)
    client = start(says(output.replace("NUMBER", "1e9"), tokenizer), tokenizer=tokenizer).client
    (choice,) = client.chat.completions.create(**asked).choices
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"to": 1e9}
    ]
    client = start(says(output.replace("NUMBER", "1e999"), tokenizer), tokenizer=tokenizer).client
    with pytest.raises(openai.InternalServerError, match="a number beyond all floats"):
        client.chat.completions.create(**asked)
    with pytest.raises(openai.APIError, match="a number beyond all floats"):
        list(client.chat.completions.create(**asked, stream=True))
    (cut,) = client.chat.completions.create(**asked, max_tokens=len(output) - 9).choices
    assert cut.finish_reason == "length"


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_calls_or_else_structured(start: Start, form: str) -> None:
    """As agents ask that have tools, and a type of their last answer."""
    tokenizer, schema = tokenizer_of(form), Weather.model_json_schema()
    text = '{"city": "Rome", "days": 3}'
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked = {**ASKED, "temperature": 0, "response_format": wanted}
    if form == "harmony":  # this template has no thinking, whose reader takes the channel away
        text = f"<|channel|>final<|message|>{text}"
    client = start(says(text, tokenizer), tokenizer=tokenizer).client
    (choice,) = client.chat.completions.create(**asked).choices
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.message.tool_calls and not choice.message.content
    del asked["tool_choice"]
    for one, output, _, calls in OUTPUTS:
        if one == form and calls == [("get_weather", {"city": "Oslo", "days": 3})]:
            client = start(says(output, tokenizer), tokenizer=tokenizer).client
            (choice,) = client.chat.completions.create(**asked).choices
            assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


def test_none_is_no_tools_and_one_call_is_one(start: Start) -> None:
    output = OUTPUTS[1][1]
    tokenizer = tokenizer_of("hermes")
    client = start(says(output, tokenizer), tokenizer=tokenizer).client
    asked = {**ASKED, "temperature": 0}
    answer = client.chat.completions.create(**asked, tool_choice="none")
    assert answer.choices[0].message.content == output and answer.usage.prompt_tokens == 20
    answer = client.chat.completions.create(**asked, parallel_tool_calls=False)
    assert [one.function.name for one in answer.choices[0].message.tool_calls] == ["get_weather"]


def test_the_turns_before_reach_the_template(start: Start) -> None:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "x", "arguments": '{"a": 1}'}}
        ],
    }
    messages = [called, {"role": "tool", "tool_call_id": "1", "content": "warm"}]

    def prompt(form: str) -> str:
        served = start(tokenizer=tokenizer_of(form))
        body = {"messages": messages}
        found: Any = served.client.post(f"{served.url}/tokenize", body=body, cast_to=object)
        return served.tokenizer.decode(found["tokens"], skip_special_tokens=False)

    function = '{"name": "x", "arguments": {"a": 1}}'
    call = f'{{"id": "1", "type": "function", "function": {function}}}'
    assert prompt("hermes") == f"[assistant][{call}]\n[tool]warm1\n[assistant]"
    assert prompt("glm45") == prompt("hermes")
    assert prompt("glm4") == '[assistant]x{"a": 1}\n[observation]warm\n[assistant]'
    code = "```python\ntool_call(a=1)\n```"
    assert prompt("chatglm3") == f"[gMASK]sop{TURN_TAG}x\n{code}<|observation|>\nwarm{TURN_TAG}"


def test_chatglm3_calls_tools(launch: Launch, tmp_path: Path) -> None:
    """Of random weights, from its folder."""
    folder = write_chatglm3(tmp_path / "model", seq_length=1024)
    _, url = launch(f"model={folder}")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {**ASKED, "model": client.models.list().data[0].id}
    answer = client.chat.completions.create(**asked, tool_choice="required", temperature=2)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert call.function.name in ("get_weather", "clock")
    call = call.model_dump(include={"id", "type", "function"})
    asked["messages"] = [
        *ASKED["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "warm"},
    ]
    more = client.chat.completions.create(**asked, max_tokens=1).usage.prompt_tokens
    assert more > answer.usage.prompt_tokens + 10


def any_of(tokenizer: Tokenizer) -> MockBackend:
    """A model that knows nothing of any token."""

    def logits(history: list[int], adapter: int) -> NDArray[np.float32]:
        known = chaos([min(one, 255) for one in history], adapter)
        return np.pad(known, (0, tokenizer.vocab_size - len(known)))

    return MockBackend(logits, 4, 4096, 4)


def test_marks_that_are_special_tokens_are_read_too(start: Start) -> None:
    tokenizer = tokenizer_with_chat(TEMPLATES["glm45"], MARKS)
    client = start(any_of(tokenizer), tokenizer=tokenizer).client
    answer = client.chat.completions.create(
        **ASKED, tool_choice="required", seed=2, temperature=2, parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name in ("get_weather", "clock")
    tokenizer = tokenizer_with_chat(TEMPLATES["mistral"], ["[TOOL_CALLS]"])
    client = start(any_of(tokenizer), tokenizer=tokenizer).client
    answer = client.chat.completions.create(**ASKED, tool_choice="required", seed=1)
    assert {one.function.name for one in answer.choices[0].message.tool_calls} <= {
        "get_weather",
        "clock",
    }
    assert len(answer.choices[0].message.tool_calls[0].id) == 9


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools", "two tools have the name get_weather"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type", "'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", ""),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "tool_choice: only with tools"),
    ({"tool_choice": "any"}, "tool_choice", ""),
    (
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "tool_choice: no tool has the name x",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}},
        "tool_choice.allowed_tools.mode",
        "got 'any', expected 'auto' or 'required'",
    ),
    ({"tool_choice": "required", "min_tokens": 3}, "min_tokens", "combined with tool_choice"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "x", "parameters": {"not": {}}}}],
        },
        "tools",
        "not",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": "["}}],
                }
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
        "expected a JSON object",
    ),
]


@pytest.mark.parametrize(("changes", "param", "message"), REFUSED, ids=lambda one: str(one)[:50])
def test_unsupported_fields_are_refused_by_name(
    start: Start, changes: dict[str, Any], param: str, message: str
) -> None:
    served: Served = start(tokenizer=tokenizer_with_chat(TEMPLATES["hermes"]))
    with pytest.raises(openai.BadRequestError) as raised:
        served.client.post("/chat/completions", body={**ASKED, **changes}, cast_to=object)
    assert raised.value.body["param"] == param
    assert message in raised.value.body["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({}, "tools"),
        ({"tools": None, "messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ],
)
def test_a_template_without_tools_is_reported(
    start: Start, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template has no tools") as raised:
        start().client.post("/chat/completions", body={**ASKED, **changes}, cast_to=object)
    assert raised.value.body["param"] == param


TOOLS: dict[str, Any] = {
    "look": {
        "properties": {
            "text": {"type": "string"},
            "kind": {"enum": ["a", "</tool_call>", "ü\n"]},
            "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
            "where": {"$ref": "#/$defs/where"},
        },
        "required": ["kind"],
        "additionalProperties": False,
        "$defs": {
            "where": {
                "type": "object",
                "properties": {"to": {"items": {"type": "string"}, "type": "array"}},
                "required": ["to"],
                "additionalProperties": False,
            }
        },
    },
    "look_up": {"properties": {"n": {"type": "integer"}, "all": {"type": "boolean"}}},
}
PIECES = [
    *MARKS,
    *("look", "look_up", "text", "kind", "note", "where", "to", "n", "all"),
    *("a", "ü", "3", "true", "null", "None", "'", '"', "\\", "\n", " ", "<", ">"),
    *("{", "}", "[", "]", ":", ", ", "=", "(", ")", "```python", "```", "tool_call(", '{"to": ["'),
    *("<|assistant|>", "=", '"a"', '"name": "look', '"arguments": ', '"parameters": '),
]


@pytest.mark.parametrize(
    "form", ["glm45", "qwen3_coder", "seed_oss", "chatglm3", "gemma", "gemma4", "pythonic"]
)
def test_forced_calls_are_read(form: Name) -> None:
    """Random ways through the grammar, in pieces that are likely to mislead the parser."""
    allowed, chance, texts = Allowed(form, TOOLS, several=True), random.Random(1), set()
    for _ in range(160):
        walk = allowed.walk()
        while not walk.over and len(walk.text) < 400:
            if not any(walk.take(piece) for piece in chance.choices(PIECES, k=30)):
                walk.take_any(chance)
        if walk.over:
            texts.add(walk.text)
    assert len(texts) > 20
    for text in texts:
        cut = read_however_cut if len(text) < 90 else read
        rest, calls = cut(form, text, TOOLS)
        assert not rest and calls, text
        for name, arguments in calls:
            check(name, arguments)


def check(name: str, arguments: dict[str, Any]) -> None:
    """Of the schemas above."""
    assert arguments.keys() <= TOOLS[name]["properties"].keys()
    if name == "look":
        assert arguments["kind"] in TOOLS[name]["properties"]["kind"]["enum"]
        assert isinstance(arguments.get("text", ""), str)
        note = arguments.get("note")
        assert note is None or (isinstance(note, str) and len(note) <= 3)
        assert all(isinstance(to, str) for to in arguments.get("where", {"to": []})["to"])
    else:
        assert type(arguments.get("n", 1)) is int and type(arguments.get("all", True)) is bool


@each("form", FORMATS)
def test_garbage_is_read_alike_however_it_is_cut(form: Name) -> None:
    chance = random.Random(2)
    for _ in range(60):
        read_however_cut(form, "".join(chance.choices(PIECES, k=12)), TOOLS)
