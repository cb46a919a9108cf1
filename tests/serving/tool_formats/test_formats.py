"""All forms: which one a template has, and that what is forced is read."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lite_runner.serving.tool_formats.formats import FORMATS, Name, format_of
from lite_runner.serving.tool_formats.pairs import MARKS
from tests.serving.tool_formats.reading import Allowed, read, read_however_cut

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


def test_the_template_tells() -> None:
    assert format_of("{% if tools %}<tool_call>{% endif %}") is FORMATS["tags"]
    glm45 = "[gMASK]{% if tools %}<tool_call><arg_key>{% endif %}<|observation|>"
    assert format_of(glm45) is FORMATS["pairs"]
    assert format_of(None, "chatglm3") is FORMATS["turns"]


def test_templates_that_know_no_tools() -> None:
    assert format_of("{% for m in messages %}tools <tool_call>{{ m['tools'] }}{% endfor %}") is None
    assert format_of("{% if tools is defined %}unknown{% endif %}") is None
    assert format_of("{{ m }}", "chatglm3") is None  # an explicit one, which wins
    assert format_of(None, "chatglm2") is None
    assert format_of(None) is None


@pytest.mark.parametrize("form", ["pairs", "turns"])
def test_what_is_forced_is_read(form: Name) -> None:
    """Random ways through the grammar, in pieces that are likely to mislead the parser."""
    allowed, chance, texts = Allowed(form, TOOLS, several=True), random.Random(1), set()
    for _ in range(400):
        walk = allowed.walk()
        while not walk.over and len(walk.text) < 400:
            if not any(walk.take(piece) for piece in chance.choices(PIECES, k=30)):
                walk.take_any(chance)
        if walk.over:
            texts.add(walk.text)
    assert len(texts) > 60
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


@pytest.mark.parametrize("form", FORMATS)
def test_garbage_is_read_alike_however_it_is_cut(form: Name) -> None:
    chance = random.Random(2)
    for _ in range(60):
        read_however_cut(form, "".join(chance.choices(PIECES, k=12)), TOOLS)
