"""Structured output: the grammar that a request asks for, in OpenAI's form or in vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lite_runner.serving.errors import ApiError
from lite_runner.serving.grammars import Grammar, of_choices, of_regex, of_schema
from lite_runner.serving.schemas import Sampling, Schema
from lite_runner.system.json_file import parse_json

_OBJECT = {"type": "object"}


def grammar_of(body: Sampling) -> Grammar | None:
    """What the answer is restricted to; None: nothing. Raises ApiError for two grammars, or one
    with another field that contradicts it."""
    found = list(_grammars(body))
    if len(found) > 1:
        raise ApiError(400, f"{found[1].field}: not with {found[0].field}", found[1].field)
    if not found:
        return None
    check_free_end(body, found[0].field)
    return found[0]


def check_free_end(body: Sampling, field: str) -> None:
    """A grammar says where an answer ends. Raises ApiError for fields that say so, too."""
    for name, value in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens)):
        if value:
            raise ApiError(400, f"{name}: not with {field}", name)


def _grammars(body: Sampling) -> Iterator[Grammar]:
    wanted = body.response_format
    if wanted is not None and wanted.json_schema is not None:
        yield of_schema(wanted.json_schema.schema_, "response_format")
    elif wanted is not None and wanted.type == "json_object":
        yield of_schema(_OBJECT, "response_format")
    if body.guided_json is not None:
        yield of_schema(_schema(body.guided_json, "guided_json"), "guided_json")
    if body.guided_regex is not None:
        yield of_regex(body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        yield of_choices(body.guided_choice, "guided_choice")
    if (outputs := body.structured_outputs) is None:
        return
    if outputs.json_ is not None:
        yield of_schema(
            _schema(outputs.json_, "structured_outputs.json"), "structured_outputs.json"
        )
    if outputs.json_object:
        yield of_schema(_OBJECT, "structured_outputs.json_object")
    if outputs.regex is not None:
        yield of_regex(outputs.regex, "structured_outputs.regex")
    if outputs.choice is not None:
        yield of_choices(outputs.choice, "structured_outputs.choice")


def _schema(given: Schema, field: str) -> dict[str, Any]:
    """A schema, which may be JSON in a text."""
    if isinstance(given, dict):
        return given
    try:
        found = parse_json(given)
    except ValueError as error:
        raise ApiError(400, f"{field}: not JSON: {error}", field, "invalid_value") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"{field}: expected a JSON object", field, "invalid_value")
    return found
