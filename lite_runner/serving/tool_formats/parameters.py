"""What a tool's schema says of its parameters, one by one: for models that write no JSON object."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lite_runner.records import dataclass
from lite_runner.serving.errors import ApiError
from lite_runner.serving.grammars import keywords

Types = frozenset[str]  # of JSON values
TEXT: Types = frozenset(("string",))
_ANY = frozenset(("string", "number", "boolean", "null", "object", "array"))
_NAMES = {"str": "string", "bool": "boolean", "NoneType": "null", "dict": "object", "list": "array"}
_DEFINITIONS = ("$defs", "definitions")
_MOST_REFERENCES = 8  # one after the other
# What a schema may ask of the arguments together.
_TOGETHER = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
)


@dataclass(frozen=True)
class Parameter:
    """One that a forced call may have."""

    name: str
    schema: dict[str, Any]  # with the definitions that it refers to
    resolved: dict[str, Any]  # with what a reference names in its place
    required: bool


def types_of(tool: Mapping[str, Any]) -> dict[str, Types]:
    """The JSON types that each parameter of a tool's schema may have."""
    listed = tool.get("properties")
    if not isinstance(listed, dict):
        return {}
    return {name: types(_resolved(schema, tool)) for name, schema in listed.items()}


def types(schema: Any) -> Types:
    """The JSON types that a schema without references allows, or more."""
    if not isinstance(schema, dict):
        return _ANY
    if isinstance(named := schema.get("type"), (str, list)):
        listed = [named] if isinstance(named, str) else named
        return frozenset(
            "number" if one == "integer" else one for one in listed if isinstance(one, str)
        )
    if "const" in schema:
        return frozenset((type_of(schema["const"]),))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(type_of, values))
    if isinstance(members := schema.get("anyOf", schema.get("oneOf")), list):
        return Types().union(*map(types, members))
    return _ANY


def type_of(value: Any) -> str:
    """Of a JSON value."""
    return _NAMES.get(type(value).__name__, "number")


def parameters(tool: Mapping[str, Any], names: re.Pattern[str]) -> list[Parameter]:
    """Of a tool's schema, for a grammar. Raises ApiError for what a model that writes them one by
    one cannot be held to, and for a name that is none of `names`."""
    listed, required = tool.get("properties", {}), tool.get("required", [])
    for key in _TOGETHER:
        if key in tool:
            raise refused(f"{key} of all arguments")
    if not isinstance(listed, dict) or not isinstance(required, list):
        raise refused("properties or required of another type")
    if unknown := [name for name in required if name not in list(listed)]:
        raise refused(f"{str(unknown[0])[:80]!r}, which is required and no property")
    definitions = {key: tool[key] for key in _DEFINITIONS if key in tool}
    for key, value in keywords([listed, definitions]):
        if key == "$ref" and isinstance(value, str) and not _is_definition(value):
            raise refused(f"the reference {value[:80]!r}, which is of no definition")
    made = []
    for name, given in listed.items():
        schema = {} if given is True else given
        if not isinstance(schema, dict) or not names.fullmatch(name):
            raise refused(f"the property {name[:80]!r}")
        if any(key == "$ref" for key, _ in keywords(schema)):
            schema = {**schema, **definitions}
        made.append(Parameter(name, schema, _resolved(given, tool), name in required))
    return made


def refused(what: str) -> ApiError:
    """Of a forced call."""
    why = f"tools: not supported in a forced call of this model: {what}"
    return ApiError(400, why, "tools", "invalid_value")


def _is_definition(reference: str) -> bool:
    return reference.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS))


def _resolved(schema: Any, tool: Mapping[str, Any]) -> dict[str, Any]:
    """With what its references name in their place; {}: it says nothing."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(named := schema.get("$ref"), str):
            break
        found: Any = tool
        for step in named.removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**found, **beside} if isinstance(found, dict) else beside
    return schema if isinstance(schema, dict) else {}
