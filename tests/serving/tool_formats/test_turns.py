"""Calls as ChatGLM3 writes them."""

from __future__ import annotations

from typing import Any

import pytest

from lite_runner.serving.tool_formats.formats import FORMATS
from lite_runner.serving.tool_formats.turns import TAG, written
from tests.serving.tool_formats.reading import Allowed, read_however_cut, refusal

TOOLS: dict[str, Any] = {"get_weather": {}, "get": {}}


def turn(code: str, name: str = "get_weather") -> str:
    return f" {name}\n ```python\ntool_call({code})\n```"


CALLS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    (turn("city='Oslo', n=3"), "", [("get_weather", {"city": "Oslo", "n": 3})]),
    (turn("", "get").strip(), "", [("get", {})]),
    (f"\n Let me see.{TAG}{turn('a=[1]')}", "\n Let me see.", [("get_weather", {"a": [1]})]),
    (turn("a=1") + TAG + turn("b=2", "get"), "", [("get_weather", {"a": 1}), ("get", {"b": 2})]),
    (f"{turn('')}{TAG}\n So.", "\n So.", [("get_weather", {})]),
    (f"{turn('')}\n So.", "So.", [("get_weather", {})]),
    (turn(f"a='{TAG} ```\\n'"), "", [("get_weather", {"a": f"{TAG} ```\n"})]),
    # With less around it, and cut by the answer's limit.
    ("get_weather\ntool_call(a='x')", "", [("get_weather", {"a": "x"})]),
    ("get \n```\n tool_call(\n  a='ü',\n)\n", "", [("get", {"a": "ü"})]),
]


@pytest.mark.parametrize(("said", "text", "calls"), CALLS)
def test_calls_and_texts(said: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert read_however_cut("turns", said, TOOLS) == (text, calls)


@pytest.mark.parametrize(
    "said",
    [
        "",
        " get_weather",
        " get_weather\n is a tool.",
        "\n get_weather\n ```python\ntool_call()\n```",
        turn("", "unknown"),
        turn("1"),
        turn("a=__import__('os').system('x')"),
        turn("a=1, a=2"),
        turn("a='x"),
        turn("a=1).b("),
        turn("a=1)[0"),
        turn("a=1); tool_call("),
        " get\n ```python\nprint(1)\n```",
        " get\n {}",
    ],
)
def test_what_is_no_call_stays_text(said: str) -> None:
    assert read_however_cut("turns", said, TOOLS) == (said, [])
    # The tag is not in the text: a turn that follows is no call either.
    assert read_however_cut("turns", f"x{TAG}{said}{TAG}\n y", TOOLS) == (f"x{said}\n y", [])


def test_texts_stream_and_calls_come_at_the_end() -> None:
    parser = FORMATS["turns"].parser(TOOLS)
    assert parser.put("\n Hello <|ass") == ["\n Hello "]
    assert parser.put("ume|>") == ["<|assume|>"]
    assert parser.put(f" you{TAG} get_") == [" you"]
    assert parser.put("no ") == [" get_no "]
    assert parser.put(TAG + turn("a=1", "get")) == []
    (made,) = parser.finish()
    assert made.arguments == '{"a": 1}'  # type: ignore[union-attr]
    assert parser.finish() == []


SCHEMA: dict[str, Any] = {
    "properties": {
        "a": {"type": "string", "maxLength": 2},
        "b": {"$ref": "#/$defs/b"},
        "ü": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["b"],
    "$defs": {"b": {"enum": ["x", None]}},
}


def test_which_arguments_there_may_be() -> None:
    tools = {"get_weather": SCHEMA, "get": {}, "put": {"properties": {"a": {}, "b": {}}}}
    allowed = Allowed("turns", tools, several=True)
    for code in ('b="x"', "b=null", 'a="é)", b="x"', 'a="", b=null, ü=[true]', "b=null, ü=[]"):
        assert turn(code) in allowed
        text, calls = read_however_cut("turns", turn(code), tools)
        assert not text and len(calls) == 1
    for code in ("", 'a=""', 'ü=[], b="x"', "b=null, b=null", "b=null, ", ', b="x"', 'a="abc"'):
        assert turn(code) not in allowed
    for code in ("", "a=1", "b=1", "a=1, b=2"):
        assert turn(code, "put") in allowed
    assert turn("", "get") in allowed and turn("b=1, a=2", "put") not in allowed
    assert turn("", "get") + TAG + turn("", "get") not in allowed


def test_what_cannot_be_forced_is_refused_by_its_name() -> None:
    assert "the property 'a b'" in refusal("turns", {"properties": {"a b": {}}})
    assert "allOf of all arguments" in refusal("turns", {"allOf": []})


def test_a_turn_before_is_as_the_model_writes_it() -> None:
    code = written({"city": "Oslo", "n": 3, "all": [True, None]})
    assert code == "```python\ntool_call(city='Oslo', n=3, all=[True, None])\n```"
    arguments = {"city": "Oslo", "n": 3, "all": [True, None]}
    assert read_however_cut("turns", f"get\n{code}", TOOLS) == ("", [("get", arguments)])
