"""Forced calls of random schemas, of every family: `python -m tests.serving.test_tool_formats N`
tries N of them."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any, get_args

import pytest

from lite_runner.serving.options import ToolParser
from lite_runner.serving.tool_formats import FORMATS, CallFormat
from tests.serving.tool_reading import Allowed, read

WORDS = ("a", "it's", "ü {x}", '"q"', "1", "null", "</b>", "[f(x=1)]", "", "line\nline", "\\", "😀")
KEYS = ("city", "days", "of", "note_2", "x", "all")


def schema_of(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "either"]
    kind = chance.choice([*kinds, *(["array", "object"] if depth < 2 else [])])
    if kind == "enum":
        return {"enum": chance.sample([*WORDS[:6], 3, True, None], 3)}
    if kind == "const":
        return {"type": "string", "const": chance.choice(WORDS)}
    if kind == "either":
        return {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]}
    if kind == "array":
        return {"type": "array", "items": schema_of(chance, depth + 1), "maxItems": 3}
    if kind == "object":
        return object_of(chance, depth + 1)
    return {"type": kind}


def object_of(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    names = sorted(chance.sample(KEYS, chance.randint(0, 4)))
    return {
        "type": "object",
        "properties": {name: schema_of(chance, depth) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
        "additionalProperties": False,
    }


def value_of(schema: dict[str, Any], chance: random.Random) -> Any:
    if "enum" in schema:
        return chance.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return value_of(chance.choice(schema["anyOf"]), chance)
    kind = schema["type"]
    if kind == "object":
        return {
            name: value_of(one, chance)
            for name, one in schema["properties"].items()
            if name in schema["required"] or chance.random() < 0.5
        }
    if kind == "array":
        return [value_of(schema["items"], chance) for _ in range(chance.randint(0, 3))]
    values: dict[str, Any] = {
        "string": chance.choice(WORDS),
        "integer": chance.randint(-99, 999),
        "number": chance.choice([0.5, -3, 1e3]),
        "boolean": chance.random() < 0.5,
        "null": None,
    }
    return values[kind]


def spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def is_text(schema: dict[str, Any]) -> bool:
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values and schema.get("type") is None:
        return all(isinstance(one, str) for one in values)
    return schema.get("type") == "string"


def written(form: CallFormat, arguments: dict[str, Any], schema: dict[str, Any]) -> str:
    """As the family writes them."""
    texts = {name: is_text(one) for name, one in schema["properties"].items()}
    if form.name == "glm45":
        return "".join(
            f"<arg_key>{name}</arg_key>\n<arg_value>{value if texts[name] else spelled(value)}"
            "</arg_value>\n"
            for name, value in arguments.items()
        )
    if form.name == "qwen3_coder":
        return "".join(
            f"<parameter={name}>\n{value if texts[name] else spelled(value)}\n</parameter>\n"
            for name, value in arguments.items()
        )
    if form.name == "gemma":
        return ",".join(
            f"{name}:" + (f"<escape>{value}<escape>" if texts[name] else spelled(value))
            for name, value in arguments.items()
        )
    if form.name in ("pythonic", "llama4_pythonic", "chatglm3"):
        return ", ".join(f"{name}={spelled(value)}" for name, value in arguments.items())
    return spelled(arguments)


def tried(form: CallFormat, chance: random.Random) -> None:
    """One or two calls of two tools with random schemas, allowed by the grammar and read."""
    tools = {name: object_of(chance) for name in ("look_up", "look")}
    count = 2 if form.between is not None and chance.random() < 0.3 else 1
    names = chance.choices(list(tools), k=count)
    made = [(name, value_of(tools[name], chance)) for name in names]
    said = (form.between or "").join(
        form.opening.replace("{name}", name) + written(form, value, tools[name]) + form.closing
        for name, value in made
    )
    text = form.whole[0] + said + form.whole[1]
    name: Any = form.name
    assert text in Allowed(name, tools, several=True), (form.name, tools, text)
    cut = chance.randint(0, len(text))
    for pieces in ([text], list(text), [text[:cut], text[cut:]]):
        assert read(name, pieces, tools) == ("", made), (form.name, tools, text)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_forced_calls_of_random_schemas(form: CallFormat) -> None:
    chance = random.Random(form.name)
    for _ in range(20):
        tried(form, chance)


def test_the_keys_names_are_the_formats() -> None:
    assert set(get_args(ToolParser)) == set(FORMATS)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "kimi_k2", "granite"])
def test_arguments_stream_as_they_come(name: str) -> None:
    form = FORMATS[name]
    schema = {"properties": {"city": {"type": "string"}}}
    parser = form.parser({"look_up": schema})
    head = form.whole[0] + form.opening.replace("{name}", "look_up")
    (call,) = parser.put(head + "{")[:1]
    assert call.name == "look_up"  # type: ignore[union-attr]
    (more,) = parser.put('"city": "Os')
    assert more.text == '"city": "Os'  # type: ignore[union-attr]


if __name__ == "__main__":
    began, chance = time.process_time(), random.Random(0)
    for number in range(int(sys.argv[1])):
        tried(list(FORMATS.values())[number % len(FORMATS)], chance)
    print(f"{sys.argv[1]} calls in {time.process_time() - began:.0f} s")
