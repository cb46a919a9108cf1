"""Calls as GLM-4.5 writes them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lite_runner.serving.tool_formats.formats import FORMATS
from lite_runner.serving.tool_formats.pairs import END
from tests.serving.tool_formats.reading import read, read_however_cut

TOOLS: dict[str, Any] = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "colour": {"$ref": "#/$defs/colour"},
            "one_of": {"enum": ["1", "2"]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "number": {"type": "number"},
            "list": {"type": "array"},
            "any": {},
        },
        "$defs": {"colour": {"type": "string"}},
    },
    "broken": {"properties": ["x"]},
}


def pair(key: str, value: str) -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"


def call(*pairs: str, name: str = "f") -> str:
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


VALUES: list[tuple[str, str, Any]] = [
    ("text", "Oslo", "Oslo"),
    ("text", "3", "3"),
    ("text", ' {"a": 1}\n', ' {"a": 1}\n'),
    ("text", "", ""),
    ("text", '"quoted', '"quoted'),
    ("text", "a < b </tool_call> <tool_call> c", "a < b </tool_call> <tool_call> c"),
    ("colour", "null", "null"),
    ("one_of", "2", "2"),
    ("maybe", "null", None),
    ("maybe", "007", "007"),
    ("maybe", "7", "7"),
    ("maybe", '"null"', "null"),
    ("number", "7", 7),
    ("number", " -1.5e3 ", -1500.0),
    ("number", "seven", "seven"),
    ("list", '["</arg_value></tool_call>", "\\""]', ["</arg_value></tool_call>", '"']),
    ("list", "[1, {}", "[1, {}"),
    ("any", '{"ü": [true, null]}', {"ü": [True, None]}),
    ("any", "2020-01-01", "2020-01-01"),
    ("any", "NaN", "NaN"),
    ("unknown", "[1]", [1]),
    ("unknown", "東京", "東京"),
    ("unknown", "1" * 100, "1" * 100),
]


@pytest.mark.parametrize(("key", "value", "expected"), VALUES)
def test_the_schema_tells_texts_from_json(key: str, value: str, expected: Any) -> None:
    assert read_however_cut("pairs", call(pair(key, value)), TOOLS) == (
        "",
        [("f", {key: expected})],
    )


CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    (f"a\n{call()}", "a", [("f", {})]),
    (f"<think>b</think>{call()}\n{call(name='g')}\n", "<think>b</think>", [("f", {}), ("g", {})]),
    (f"{call()} and {call()} c", " and c", [("f", {}), ("f", {})]),
    (
        call(pair("text", "x"), pair("any", "y"), name="broken"),
        "",
        [("broken", {"text": "x", "any": "y"})],
    ),
    # As GLM-4.7 breaks no lines, and one that the answer's limit has cut.
    (call(pair("text", "x")).replace("\n", ""), "", [("f", {"text": "x"})]),
    (call(pair("text", "x")).removesuffix(END), "", [("f", {"text": "x"})]),
]


@pytest.mark.parametrize(("said", "text", "calls"), CALLS)
def test_calls_and_texts(said: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert read_however_cut("pairs", said, TOOLS) == (text, calls)


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        call("what"),
        call(pair("text", "a"), pair("text", "b")),
        call(pair("text", "a"), "<arg_key>x</arg_key>"),
        call(pair("", "a")),
        call(pair("a<b", "a")),
        "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>never closed</tool_call> x",
        'x <tool_call>{"name": "f", "arguments": {}}</tool_call>'.replace('"', "<"),
        "</tool_call></arg_value><arg_key>",
    ],
)
def test_what_is_no_call_stays_text(said: str) -> None:
    assert read_however_cut("pairs", said, TOOLS) == (said, [])


def test_texts_stream_and_calls_come_when_they_are_complete() -> None:
    parser = FORMATS["pairs"].parser(TOOLS)
    assert parser.put("Hello ") == ["Hello"]
    assert parser.put("you") == [" you"]
    whole = call(pair("text", END))
    assert parser.put(whole[:-1]) == []
    (made,) = parser.put(whole[-1])
    assert made.arguments == '{"text": "</tool_call>"}'  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "said",
    [
        call(pair("list", '["' + "<" * 200_000)),
        call(pair("list", "[" * 200_000)),
        call(pair("any", "[" * 500 + "]" * 500)),
        call(*(pair(f"a{number}", "1") for number in range(10_000))),
        "<tool_call>" * 20_000,
        call(" " * 200_000 + "x"),
    ],
    ids=lambda said: said[20:60],
)
def test_what_is_hostile_takes_no_time(said: str) -> None:
    began = time.process_time()
    read("pairs", [said], TOOLS)
    assert time.process_time() - began < 2
