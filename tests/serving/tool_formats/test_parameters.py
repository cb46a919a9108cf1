"""What schemas say of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from lite_runner.serving.tool_formats.parameters import type_of, types, types_of

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


@pytest.mark.parametrize(("schema", "expected"), TYPES)
def test_types(schema: Any, expected: set[str]) -> None:
    assert types(schema) == expected


def test_references_are_followed_as_far_as_they_lead() -> None:
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
