"""The grammar of the calls in pairs.py: what it allows, their parser reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from lite_runner.serving.grammars import json_rule, regex_terminal
from lite_runner.serving.tool_formats.calls import Spell
from lite_runner.serving.tool_formats.pairs import KEY, KEY_END, KEYS, VALUE, VALUE_END
from lite_runner.serving.tool_formats.parameters import TEXT, Parameter, parameters, refused, types

_TEXTS = "/(?s:.*)/"
_NOT_HERE = ("$ref", "allOf", "oneOf", "not", "if")  # keywords that the grammar of a text lacks


def pair_rules(rule: str, tool: Mapping[str, Any], spell: Spell) -> list[str]:
    """The arguments of a tool. See Format."""
    pairs, values, new_line = [], [], f"{spell(chr(10))}?"
    for number, one in enumerate(parameters(tool, KEYS)):
        value = f"{rule}_{number}"
        key = f"{spell(f'{KEY}{one.name}{KEY_END}')} {new_line} {spell(VALUE)}"
        pairs.append(f"({key} {value} {new_line}){'' if one.required else '?'}")
        values += _value_rules(value, one, spell(VALUE_END))
    return [f"{rule}: {' '.join([new_line, *pairs])}", *values]


def _value_rules(rule: str, parameter: Parameter, end: str) -> list[str]:
    """A value, and `end`, the mark behind it."""
    if types(parameter.resolved) != TEXT:
        return [f"{rule}: {rule}_json {end}", f"{rule}_json: {json_rule(parameter.schema)}"]
    text, terminal = _text(parameter.resolved), rule.upper()
    if end.startswith("<"):  # a token of its own, which no terminal can have in it
        return [f"{rule}: {terminal} {end}", f"{terminal}: {text}"]
    # A terminal takes as much as it can: on its own it would take the first half of the mark.
    return [f"{rule}: {terminal}", f"{terminal}: ({text}) {end}"]


def _text(schema: Any) -> str:
    """The texts of a schema, but for those with the mark in them; `format` is a remark."""
    if not isinstance(schema, dict):
        raise refused(f"the schema {schema!r} of a text")
    for key in _NOT_HERE:
        if key in schema:
            raise refused(f"{key} of a text")
    parts = [_TEXTS, f"~/(?s:.*)<\\{VALUE_END[1:]}(?s:.*)/"]
    choices = [schema["const"]] if "const" in schema else _get(schema, "enum", list, [])
    if choices:
        texts = [one for one in choices if isinstance(one, str) and VALUE_END not in one]
        if not texts:
            raise refused(f"a text that is one of {str(choices)[:80]}")
        parts.append(_one_of(map(json.dumps, texts)))
    if "minLength" in schema or "maxLength" in schema:
        least, most = _get(schema, "minLength", int, 0), _get(schema, "maxLength", int, "")
        parts.append(f"/(?s:.{{{least},{most}}})/")
    if "pattern" in schema:
        parts.append(regex_terminal(_whole(_get(schema, "pattern", str, ""))))
    if members := _get(schema, "anyOf", list, []):
        parts.append(_one_of(map(_text, members)))
    return " & ".join(parts)


def _get(schema: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    found = schema.get(key, default)
    if found is not default and not isinstance(found, kind):
        raise refused(f"{key} {str(found)[:80]}")
    return found


def _one_of(parts: Iterable[str]) -> str:
    return f"({' | '.join(parts)})"


def _whole(pattern: str) -> str:
    """A regex of whole texts, for one that a schema searches in them."""
    first, last = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    before, after = "" if first else "(?s:.*)", "" if last else "(?s:.*)"
    return f"{before}(?:{pattern[first : len(pattern) - last]}){after}"
