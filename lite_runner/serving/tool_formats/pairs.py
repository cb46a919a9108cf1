"""Calls of GLM-4.5 and those after it: <tool_call>name, then each argument's key and value.

In <arg_key>city</arg_key><arg_value>Oslo</arg_value> a text stands as it is, and anything else as
JSON. GLM-4.5 and 4.6 end the line behind the name and the closing marks, GLM-4.7 does not.
"""

from __future__ import annotations

import json
import re
from typing import Any

from lite_runner.serving.tool_formats.calls import SPACE, Call, Parser, Tools, json_of
from lite_runner.serving.tool_formats.marked import BEGIN, END, Marked
from lite_runner.serving.tool_formats.parameters import TEXT, Types, type_of, types_of

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKS = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)
KEYS = re.compile("[^<]+")
_NAME = re.compile(r"\s*([^\s<]+)")
_PAIR = re.compile(rf"\s*{KEY}({KEYS.pattern}){KEY_END}\s*{VALUE}")
# JSON, as far as its texts are concerned: the mark that closes a value may stand in one. It does
# not backtrack, for no alternative begins as another does.
_JSON = re.compile(rf'\s*(?=[\[{{"])(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!{VALUE_END[1:]}))*', re.DOTALL)


def glm45(tools: Tools) -> Parser:
    """Reads several, with texts between."""
    reader = _Reader(tools)
    return Marked(reader.ends, reader.read)


class _Reader:
    """Reads what is between the marks of a call."""

    def __init__(self, tools: Tools) -> None:
        self._types = {name: types_of(schema) for name, schema in tools.items()}

    def ends(self, text: str) -> int:
        """Where END is, if not in a value; -1: nowhere yet."""
        if END not in text or (found := self._pairs(text)) is None:
            return -1
        return text.find(END, found[2])

    def read(self, text: str) -> Call | None:
        """None: it is no call."""
        if (found := self._pairs(text)) is None:
            return None
        name, pairs, at = found
        values = {key: _value(value, self._allowed(name, key)) for key, value in pairs}
        if not name or len(values) < len(pairs) or text[at:].strip(SPACE):
            return None
        return Call(name, json.dumps(values, ensure_ascii=False))

    def _pairs(self, text: str) -> tuple[str, list[tuple[str, str]], int] | None:
        """The name, the keys and values, and where they end; None: a value has no end yet."""
        if (begin := _NAME.match(text)) is None:
            return "", [], 0
        name, at, pairs = begin[1], begin.end(), []
        while pair := _PAIR.match(text, at):
            end = _value_end(text, pair.end(), self._allowed(name, pair[1]))
            if end < 0:
                return None
            pairs.append((pair[1], text[pair.end() : end]))
            at = end + len(VALUE_END)
        return name, pairs, at

    def _allowed(self, name: str, key: str) -> Types | None:
        """The types of a parameter; None: it is not known."""
        return self._types.get(name, {}).get(key)


def _value_end(text: str, at: int, allowed: Types | None) -> int:
    """Of the value that begins at `at`; -1: nowhere yet."""
    if allowed != TEXT and (found := _JSON.match(text, at)):
        return found.end() if text.startswith(VALUE_END, found.end()) else -1
    return text.find(VALUE_END, at)


def _value(text: str, allowed: Types | None) -> Any:
    """A text where it may be nothing else, or is no JSON, or JSON of a type that may not be."""
    if allowed == TEXT:
        return text
    value = json_of(text)
    if value is None and text.strip(SPACE) != "null":
        return text
    is_text = allowed is not None and "string" in allowed and type_of(value) not in allowed
    return text if is_text else value
