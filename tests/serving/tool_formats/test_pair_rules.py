"""Forced calls of GLM-4.5."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.tool_formats.reading import Allowed, read_however_cut, refusal
from tests.serving.tool_formats.test_pairs import call, pair


def allowed(schema: Any, *values: str) -> list[str]:
    """Which values a parameter may have."""
    tools = {"f": {"properties": {"x": schema}, "required": ["x"]}}
    grammar = Allowed("pairs", tools)
    found = [value for value in values if call(pair("x", value)) in grammar]
    for value in found:
        text, calls = read_however_cut("pairs", call(pair("x", value)), tools)
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


@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS, ids=str)
def test_values_are_of_the_schema(schema: Any, right: list[str], wrong: list[str]) -> None:
    assert allowed(schema, *right, *wrong) == right


def test_references_are_to_the_tools_definitions() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/$defs/text"}, "b": {"items": {"$ref": "#/$defs/text"}}},
        "$defs": {"text": {"enum": ["x", "y"]}},
    }
    grammar = Allowed("pairs", {"f": schema})
    assert call(pair("a", "x"), pair("b", '["y"]')) in grammar
    assert call(pair("a", "z")) not in grammar and call(pair("b", '["z"]')) not in grammar


def test_which_arguments_there_may_be() -> None:
    schema = {"properties": {"a": {}, "b": {}, "ü c": {}}, "required": ["b"]}
    grammar = Allowed("pairs", {"f": schema, "fg": {}}, several=True)
    a, b, c = pair("a", "1"), pair("b", "2"), pair("ü c", "3")
    for pairs in ([b], [a, b], [b, c], [a, b, c]):
        assert call(*pairs) in grammar and call(*pairs).replace("\n", "") in grammar
    for pairs in ([], [a], [b, a], [b, b], [a, b, c, pair("d", "4")]):
        assert call(*pairs) not in grammar
    assert call(name="fg") in grammar and call(name="g") not in grammar
    assert f"{call(b)}\n{call(name='fg')}\n{call(a, b)}" in grammar
    assert f"{call(b)}\nx" not in grammar


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"anyOf": [{}]}, "anyOf of all arguments"),
    ({"properties": []}, "properties or required"),
    ({"required": ["x"]}, "'x', which is required"),
    ({"required": [["x"]]}, "which is required"),
    ({"properties": {"a<b": {}}}, "the property 'a<b'"),
    ({"properties": {"a": False}}, "the property 'a'"),
    ({"properties": {"a": {"items": {"$ref": "#"}}}}, "the reference '#'"),
    ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {}}}, "of no definition"),
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


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_cannot_be_forced_is_refused_by_its_name(schema: dict[str, Any], said: str) -> None:
    message = refusal("pairs", schema)
    assert message.startswith("tools: ") and said in message
