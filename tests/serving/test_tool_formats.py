"""Forced calls of random schemas, of every family: `python -m tests.serving.test_tool_formats N`
tries N of them."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any, get_args

import pytest

from lite_runner.serving.options import ToolParser as Name
from lite_runner.serving.tool_formats import FORMATS, CallFormat, detect_format
from lite_runner.serving.tool_parsers import DEEPSEEK_CALL, DEEPSEEK_SEP, type_of, types, types_of
from lite_runner.text.tokenizer import byte_tokenizer
from tests.each import each
from tests.serving.conftest import Start, tokenizer_of_chatglm3, tokenizer_with_chat
from tests.serving.test_tool_parsers import call, pair, qwen3_call, qwen3_pair
from tests.serving.tool_reading import Allowed, read, read_however_cut, refusal

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
    if form.name == "seed_oss":
        return "".join(
            f"<parameter={name}>{value if texts[name] else spelled(value)}</parameter>\n"
            for name, value in arguments.items()
        )
    if form.name in ("gemma", "gemma4"):
        mark = form.marks[-1]
        return ",".join(
            f"{name}:" + (f"{mark}{value}{mark}" if texts[name] else spelled(value))
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
    calls = [(name, value_of(tools[name], chance)) for name in names]
    body = (form.between or "").join(
        form.opening.replace("{name}", name) + written(form, value, tools[name]) + form.closing
        for name, value in calls
    )
    text = form.whole[0] + body + form.whole[1]
    name: Any = form.name
    assert text in Allowed(name, tools, several=True), (form.name, tools, text)
    cut = chance.randint(0, len(text))
    for pieces in ([text], list(text), [text[:cut], text[cut:]]):
        assert read(name, pieces, tools) == ("", calls), (form.name, tools, text)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_forced_calls_of_random_schemas(form: CallFormat) -> None:
    chance = random.Random(form.name)
    for _ in range(20):
        tried(form, chance)


def test_the_keys_names_are_the_formats() -> None:
    assert set(get_args(Name)) == set(FORMATS)


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


def form_of(template: str) -> str | None:
    found = detect_format(tokenizer_with_chat(template))
    return None if found is None else found.name


def test_the_templates_text_tells() -> None:
    assert form_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert form_of("[gMASK]{% if tools %}<tool_call><arg_key>{% endif %}<|observation|>") == "glm45"
    assert form_of("{% if tools %}<tool_call><function=name><parameter=key>{% endif %}") == (
        "qwen3_coder"
    )
    assert detect_format(tokenizer_of_chatglm3()) is FORMATS["chatglm3"]


# A call of `look_up` as published templates write it.
WRITES = {
    "hermes": '<tool_call>\\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
    "llama3_json": '<|start_header_id|>{"name": "{{ f.name }}", "parameters": {}}',
    "llama4_pythonic": "<|header_start|>[{{ f.name }}(key='value')]",
    "pythonic": "[{{ f.name }}(key='value')]",
    "mistral": "[TOOL_CALLS]{{ f.name }}[ARGS]{}",
    "granite": '<|start_of_role|><|tool_call|>[{"name": "{{ f.name }}", "arguments": {}}]',
    "phi4": 'functools[{"name": "{{ f.name }}", "arguments": {}}]',
    "kimi_k2": "<|tool_call_begin|>{{ m.tool_calls[0].id }}<|tool_call_argument_begin|>",
    "deepseek_v3": f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}{{{{ f.name }}}}\\n```json\\n",
    "deepseek_v31": f"{DEEPSEEK_CALL}{{{{ f.name }}}}{DEEPSEEK_SEP}",
    "harmony": "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>",
    "gemma": "<start_function_call>call:{{ f.name }}{}<end_function_call>",
    "gemma4": "<|tool_call>call:{{ f.name }}{}<tool_call|>",
    "seed_oss": "<seed:tool_call>\\n<function={{ f.name }}>\\n",
    "nemotron_json": '<TOOLCALL>[{"name": "{{ f.name }}", "arguments": {}}]</TOOLCALL>',
    "hunyuan_a13b": '<tool_calls>[{"name": "{{ f.name }}", "arguments": {}}]</tool_calls>',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ f.name }}"}]',
    "qwen3_coder": "<tool_call>\\n<function={{ f.name }}>\\n",
    "glm45": "<tool_call>{{ f.name }}\\n<arg_key>",
}


@each("form", WRITES)
def test_the_template_tells_the_format(form: str) -> None:
    """Whatever else stands in it: here another family's mark."""
    other = "<tool_call>" if form != "hermes" else "[TOOL_CALLS]"
    template = (
        f"{{% if tools %}}{other}{{% endif %}}{{% for m in messages %}}{{{{ m.content }}}}"
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        f"{WRITES[form]}{{% endif %}}{{% endfor %}}"
    )
    assert form_of(template) == form


def test_a_key_says_it(start: Start) -> None:
    served = start(
        tokenizer=tokenizer_with_chat("{{ messages }}{{ tools }}<tool_call>"),
        tool_parser="pythonic",
    )
    assert served.server.call_format is FORMATS["pythonic"]


def test_templates_that_know_no_tools() -> None:
    assert form_of("{% for m in messages %}tools <tool_call>{{ m['tools'] }}{% endfor %}") is None
    assert form_of("{% if tools is defined %}unknown{% endif %}") is None
    assert form_of("{{ m }}") is None
    assert detect_format(byte_tokenizer()) is None


def allowed(form: Name, schema: Any, *values: str) -> list[str]:
    """The allowed values of a parameter."""
    tools = {"f": {"properties": {"x": schema}, "required": ["x"]}}
    grammar = Allowed(form, tools)

    def spelled(value: str) -> str:
        return call(pair("x", value)) if form == "glm45" else qwen3_call(qwen3_pair("x", value))

    found = [value for value in values if spelled(value) in grammar]
    for value in found:
        text, calls = read_however_cut(form, spelled(value), tools)
        assert not text and len(calls) == 1
    return found


SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string"}, ["", "a", '"a"', "ü\n", "</arg_valu", "</tool_call>"], ["</arg_value>"]),
    ({"enum": ["a", "b c", 'd"']}, ["a", "b c", 'd"'], ["", "c", '"a"']),
    ({"const": "a"}, ["a"], ["b", "aa"]),
    ({"type": "string", "enum": ["a", 1]}, ["a"], ["1"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "üüü"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-z]+$"}, ["ab"], ["", "a1"]),
    ({"type": "string", "pattern": r"\d"}, ["1", "a1b"], ["", "ab"]),
    ({"type": "string", "format": "date"}, ["2020-01-01", "tomorrow"], []),
    ({"anyOf": [{"const": "a"}, {"type": "string", "maxLength": 1}]}, ["a", "x"], ["aa"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["null", '"null"'], ["a"]),
    ({"enum": ["a", 1]}, ['"a"', "1"], ["a"]),
    ({"type": "integer", "minimum": 1}, ["1", "20"], ["0", '"1"', " 1"]),
    ({}, ['{"a": [1]}', "null", '"</arg_value>"'], ["a"]),
    (True, ["1"], ["x"]),
]


@pytest.mark.parametrize("form", ["glm45", "qwen3_coder"])
@each(("schema", "right", "wrong"), SCHEMAS)
def test_values_are_of_the_schema(
    form: Name, schema: Any, right: list[str], wrong: list[str]
) -> None:
    if form == "qwen3_coder":
        right, wrong = (
            [one.replace("arg_valu", "paramete") for one in right],
            [one.replace("arg_value", "parameter") for one in wrong],
        )
    assert allowed(form, schema, *right, *wrong) == right


def test_references_are_to_the_tools_definitions() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/text"}, "b": {"items": {"$ref": "#/$defs/text"}}},
        "$defs": {"text": {"enum": ["x", "y"]}},
    }
    grammar = Allowed("glm45", {"f": schema})
    assert call(pair("a", "x"), pair("b", '["y"]')) in grammar
    assert call(pair("a", "z")) not in grammar and call(pair("b", '["z"]')) not in grammar


def test_allowed_arguments() -> None:
    schema = {"properties": {"a": {}, "b": {}, "ü c": {}}, "required": ["b"]}
    grammar = Allowed("glm45", {"f": schema, "fg": {}}, several=True)
    a, b, c = pair("a", "1"), pair("b", "2"), pair("ü c", "3")
    for pairs in ([b], [a, b], [b, c], [a, b, c]):
        assert call(*pairs) in grammar and call(*pairs).replace("\n", "") in grammar
    for pairs in ([], [a], [b, a], [b, b], [a, b, c, pair("d", "4")]):
        assert call(*pairs) not in grammar
    assert call(name="fg") in grammar and call(name="g") not in grammar
    assert f"{call(b)}\n{call(name='fg')}\n{call(a, b)}" in grammar
    assert f"{call(b)}\nx" not in grammar


FORMATS_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"anyOf": [{}]}, "anyOf of all arguments"),
    ({"properties": []}, "properties or required"),
    ({"required": ["x"]}, "'x', which is required"),
    ({"required": [["x"]]}, "which is required"),
    ({"properties": {"a<b": {}}}, "the property 'a<b'"),
    ({"properties": {"a": False}}, "the property 'a'"),
    ({"properties": {"a": {"items": {"$ref": "#"}}}}, "the reference '#'"),
    ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "has no definition"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}}, ""),
    ({"properties": {"a": {"type": "string", "not": {}}}}, "not of a text"),
    ({"properties": {"a": {"type": "string", "oneOf": []}}}, "oneOf of a text"),
    ({"properties": {"a": {"type": "string", "maxLength": "1})/ | /(.*"}}}, "maxLength 1})"),
    ({"properties": {"a": {"type": "string", "maxLength": -1}}}, ""),
    ({"properties": {"a": {"type": "string", "minLength": 10**9}}}, ""),
    ({"properties": {"a": {"type": "string", "pattern": 1}}}, "pattern 1"),
    ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, ""),
    ({"properties": {"a": {"type": "string", "enum": 5}}}, "enum 5"),
    ({"properties": {"a": {"type": "string", "enum": [1]}}}, "one of [1]"),
    ({"properties": {"a": {"type": "string", "anyOf": [True]}}}, "the schema True"),
    ({"properties": {"a": {"const": "</arg_value>"}}, "required": ["a"]}, "one of"),
    ({"properties": {"a": {"not": {}}}}, "not"),
]


@pytest.mark.parametrize(("schema", "reason"), FORMATS_REFUSED, ids=lambda one: str(one)[:60])
def test_schemas_that_cannot_be_forced_are_refused_by_name(
    schema: dict[str, Any], reason: str
) -> None:
    message = refusal("glm45", schema)
    assert message.startswith("tools: ") and reason in message


TYPES: list[tuple[Any, set[str]]] = [
    ({"type": "string"}, {"string"}),
    ({"type": ["integer", "null"]}, {"number", "null"}),
    ({"type": "string", "enum": ["a", 1]}, {"string"}),
    ({"enum": ["a", 1, True]}, {"string", "number", "boolean"}),
    ({"const": []}, {"array"}),
    ({"anyOf": [{"const": "a"}, {"type": "object"}]}, {"string", "object"}),
    ({"oneOf": [{"type": "string"}]}, {"string"}),
    ({"type": 5, "enum": "x"}, {"string", "number", "boolean", "null", "object", "array"}),
    (True, {"string", "number", "boolean", "null", "object", "array"}),
]


@each(("schema", "expected"), TYPES)
def test_types(schema: Any, expected: set[str]) -> None:
    assert types(schema) == expected


def test_references_are_followed_to_their_end() -> None:
    schema = {
        "properties": {
            "a": {"$ref": "#/$defs/x/y", "title": "A"},
            "around": {"$ref": "#/properties/around"},
            "nowhere": {"$ref": "#/$defs/x/z/0"},
            "no": 3,
        },
        "$defs": {"x": {"y": {"$ref": "#/definitions/z"}}},
        "definitions": {"z": {"type": "null"}},
    }
    found = types_of(schema)
    assert found.pop("a") == {"null"}
    assert all(len(one) == 6 for one in found.values()) and len(found) == 3
    assert types_of({"properties": None}) == {}


def test_a_value_has_a_type() -> None:
    values = [None, True, 1, 1.5, "a", [], {}]
    expected = ["null", "boolean", "number", "number", "string", "array", "object"]
    assert list(map(type_of, values)) == expected


if __name__ == "__main__":
    began, chance = time.process_time(), random.Random(0)
    for number in range(int(sys.argv[1])):
        tried(list(FORMATS.values())[number % len(FORMATS)], chance)
    print(f"{sys.argv[1]} calls in {time.process_time() - began:.0f} s")
