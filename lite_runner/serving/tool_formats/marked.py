"""Calls between marks, which texts may stand before, between and behind."""

from __future__ import annotations

from collections.abc import Callable

from lite_runner.serving.tool_formats.calls import (
    SPACE,
    Call,
    Parser,
    Part,
    Tools,
    call_of,
    json_of,
    overlap,
)

BEGIN, END = "<tool_call>", "</tool_call>"


class Marked:
    """<tool_call>...</tool_call>, several."""

    def __init__(self, ends: Callable[[str], int], read: Callable[[str], Call | None]) -> None:
        """`ends`: where in the text after BEGIN the END of the call is, -1: nowhere yet; `read`:
        the call of what is between them."""
        self._ends, self._read = ends, read
        self._text = ""  # not yet certain
        self._gap = ""  # white space before the call that is being read
        self._inside = self._called = False

    def put(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while (place := self._next()) >= 0:
            before, mark = self._text[:place], END if self._inside else BEGIN
            self._text = self._text[place + len(mark) :]
            if self._inside:
                parts += self._call(before, mark)
            else:
                certain = before.rstrip(SPACE)
                self._gap = before[len(certain) :]
                parts += self._plain(certain)
            self._inside = not self._inside
        if not self._inside:
            held = overlap(self._text, BEGIN)
            # White space may stand before a call, and is none of the text then.
            certain = self._text[: len(self._text) - held].rstrip(SPACE)
            self._text = self._text[len(certain) :]
            parts += self._plain(certain)
        return parts

    def finish(self) -> list[Part]:
        rest, self._text = self._text, ""
        return self._call(rest, "") if self._inside else self._plain(rest)

    def _next(self) -> int:
        return self._ends(self._text) if self._inside else self._text.find(BEGIN)

    def _plain(self, text: str) -> list[Part]:
        blank = not text.strip(SPACE)
        return [] if not text or (blank and self._called) else [text]

    def _call(self, text: str, end: str) -> list[Part]:
        call = self._read(text)
        if call is None:
            return [f"{self._gap}{BEGIN}{text}{end}"]
        self._called = True
        return [call]


def hermes(_: Tools) -> Parser:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""
    return Marked(lambda text: text.find(END), lambda text: call_of(json_of(text), "arguments"))
