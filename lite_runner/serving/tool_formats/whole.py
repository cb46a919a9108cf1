"""Calls that are the whole answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from lite_runner.serving.tool_formats.calls import (
    SPACE,
    Call,
    Parser,
    Part,
    Tools,
    call_of,
    json_of,
)


class _Whole:
    """Nothing is certain before the end, but that the answer is no call."""

    def __init__(
        self, begins: Callable[[str], bool], read: Callable[[str], list[Call] | None]
    ) -> None:
        """`begins`: whether a text may be the beginning of calls; `read` reads them."""
        self._begins, self._read = begins, read
        self._text: str | None = ""  # None: no calls

    def put(self, text: str) -> list[Part]:
        if self._text is None:
            return [text] if text else []
        self._text += text
        if self._begins(self._text):
            return []
        held, self._text = self._text, None
        return [held]

    def finish(self) -> list[Part]:
        held, self._text = self._text, None
        if not held:
            return []
        calls = self._read(held)
        return [held] if calls is None else [*calls]


def llama(_: Tools) -> Parser:
    """{"name": ..., "parameters": {...}}, several with semicolons between."""
    tag = "<|python_tag|>"

    def begins(text: str) -> bool:
        text = text.lstrip(SPACE)
        return tag.startswith(text[: len(tag)]) or text.startswith("{")

    def read(text: str) -> list[Call] | None:
        text = text.strip(SPACE).removeprefix(tag)
        calls, decoder = [], json.JSONDecoder()
        while text := text.lstrip(f"{SPACE};"):
            try:
                found, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            call = call_of(found, "parameters") or call_of(found, "arguments")
            if call is None:
                return None
            calls.append(call)
            text = text[end:]
        return calls or None

    return _Whole(begins, read)


def mistral(_: Tools) -> Parser:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}."""
    mark = "[TOOL_CALLS]"

    def begins(text: str) -> bool:
        return mark.startswith(text.lstrip(SPACE)[: len(mark)])

    def read(text: str) -> list[Call] | None:
        text = text.strip(SPACE)
        if not text.startswith(mark):
            return None
        listed = json_of(text.removeprefix(mark))
        if isinstance(listed, list):
            calls = [call_of(one, "arguments") for one in listed]
        else:
            calls = []
            for part in text.split(mark)[1:]:
                found = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[ARGS\])?(\{.*)", part, re.DOTALL)
                called = {"name": found[1], "arguments": json_of(found[2])} if found else None
                calls.append(call_of(called, "arguments"))
        known = [call for call in calls if call is not None]
        return known if known and len(known) == len(calls) else None

    return _Whole(begins, read)


def glm4(tools: Tools) -> Parser:
    """The tool's name, and its arguments in the next line."""
    lines = [f"{name}\n" for name in tools]

    def begins(text: str) -> bool:
        text = text.lstrip(SPACE)
        return any(line.startswith(text) or text.startswith(line) for line in lines)

    def read(text: str) -> list[Call] | None:
        name, _, arguments = text.lstrip(SPACE).partition("\n")
        call = call_of({"name": name, "arguments": json_of(arguments)}, "arguments")
        return None if call is None else [call]

    return _Whole(begins, read)
