"""The JSON schema of a yaml: composed configs fit it, and much of what a run refuses does not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lite_runner import app
from lite_runner.config.groups import compose_groups, options_of
from lite_runner.config.json_schema import json_schema
from lite_runner.run_modes import schemas
from tests.each import each

TYPES: dict[str, Any] = {
    "object": dict,
    "array": (list, tuple),
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema(schemas())


def errors(value: Any, schema: dict[str, Any], whole: dict[str, Any], key: str = "") -> list[str]:
    """A validator's errors, by the keywords that the schema has."""
    if "$ref" in schema:
        schema = schema | whole["$defs"][schema["$ref"].rpartition("/")[2]]
    found = []
    if (kinds := schema.get("anyOf")) is not None:
        each = [errors(value, kind, whole, key) for kind in kinds]
        found += [] if not all(each) else min(each, key=len)
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{key}: not in {schema['enum']}")
    kind = schema.get("type")
    if kind is not None and (
        not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return [*found, f"{key}: not {kind}"]
    if isinstance(value, dict):
        more = schema.get("additionalProperties", True)
        for name, entry in value.items():
            below = schema.get("properties", {}).get(name, more)
            if below is False:
                found.append(f"{key}.{name}: unknown")
            elif below is not True:
                found += errors(entry, below, whole, f"{key}.{name}")
    if isinstance(value, (list, tuple)):
        found += [
            one for entry in value for one in errors(entry, schema.get("items", {}), whole, key)
        ]
    if isinstance(value, (int, float)):
        too_low = value < schema.get("minimum", value) or value <= schema.get(
            "exclusiveMinimum", value - 1
        )
        if too_low or value > schema.get("maximum", value):
            found.append(f"{key}: out of range")
    return found


def test_every_composed_config_fits(schema: dict[str, Any]) -> None:
    for mode in options_of("run_mode"):
        composed = compose_groups({"run_mode": mode, "model": "tiny_llama"})
        assert not errors(composed, schema, schema), mode
    for model in (name for name in options_of("model") if name.startswith("tiny")):
        composed = compose_groups({"model": model})
        assert not errors(composed, schema, schema), model


@each(
    ("raw", "expected"),
    [
        ({"sed": 1}, ".sed: unknown"),
        ({"seed": -1}, ".seed: "),
        ({"run_mode": "predicts"}, ".run_mode: not in"),
        ({"top_p": 0}, ".top_p: "),
        ({"serve": {"ports": 1}}, ".serve.ports: unknown"),
        ({"serve": {"port": "http"}}, ".serve.port: not integer"),
        ({"context": {"cache": "yes"}}, ".context.cache: not boolean"),
        ({"model": {"model_config": {"type": "LlamaConfig", "hidden": 1}}}, ".hidden: unknown"),
        ({"predict_data": [{"prompt": "x", "temperatures": 1}]}, ".predict_data: "),
    ],
)
def test_values_that_do_not_fit(schema: dict[str, Any], raw: dict[str, Any], expected: str) -> None:
    assert any(expected in one for one in errors(raw, schema, schema)), errors(raw, schema, schema)


def test_keys_have_meanings_and_defaults(schema: dict[str, Any]) -> None:
    serve = schema["$defs"]["Serve"]["properties"]
    assert serve["port"] == {
        "description": "0: a free one",
        "type": "integer",
        "minimum": 0,
        "maximum": 65535,
        "default": 8000,
    }
    assert schema["properties"]["temperature"]["description"].startswith("sampling: ")
    assert re.search("MindFormers", schema["properties"]["lr_schedule"]["description"])


@pytest.mark.parametrize("words", [["schema"], ["--cfg", "schema"]])
def test_a_command_prints_it(
    words: list[str], schema: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(words) == 0
    assert json.loads(capsys.readouterr().out) == schema
