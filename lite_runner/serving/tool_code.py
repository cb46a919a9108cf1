"""Parsers of tool calls that are code: chatglm3, pythonic, gemma. Nothing of it is run."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from lite_runner.serving.tool_parsers import (
    CONSTANTS,
    SPACE,
    Buffered,
    Call,
    Marked,
    Parser,
    Part,
    Tools,
    json_of,
)
from lite_runner.text.thinking import overlap

TURN_TAG = "<|assistant|>"
TURN_BEGIN, TURN_END = "```python\ntool_call(", ")\n```"
_TURN_BEGINS = re.compile(r"\s*(?:```(?:python)?\s*)?tool_call\(")
_TURN_ENDS = re.compile(rf"\s*(?:```\s*|\Z|(?={re.escape(TURN_TAG)}))")


class ChatGLM3(Buffered):
    """Reads an answer: texts stream, and from where a call may be all is held to its end."""

    def __init__(self, tools: Tools) -> None:
        self._names = tuple(tools)
        self._fresh = True  # at the head of a turn

    def _take(self, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self._fresh and self._may_call():
                if not last:
                    return parts
                if (call := self._call()) is not None:
                    parts.append(call)
            self._fresh = False
            before, tag, after = self._text.partition(TURN_TAG)
            certain = before if tag or last else before[: len(before) - overlap(before, TURN_TAG)]
            if certain:
                parts.append(certain)
            self._text = after if tag else before[len(certain) :]
            if not tag:
                return parts
            self._fresh = True

    def _may_call(self) -> bool:
        """True if the head is a tool's name, or may become one."""
        head, ends, _ = self._text.partition("\n")
        head = head.strip(SPACE)
        return head in self._names if ends else any(name.startswith(head) for name in self._names)

    def _call(self) -> Call | None:
        """The call at the beginning of the text, which is taken off."""
        head, _, code = self._text.partition("\n")
        if (begins := _TURN_BEGINS.match(code)) is None:
            return None
        if (found := read_arguments(code, begins.end())) is None:
            return None
        arguments, at = found
        if (ends := _TURN_ENDS.match(code, at)) is None:
            return None
        self._text = code[ends.end() :]
        return Call(head.strip(SPACE), json.dumps(arguments, ensure_ascii=False))


def write_turn(arguments: dict[str, Any]) -> str:
    """A call in a turn of its own, but for its head."""
    return f"{TURN_BEGIN}{write_arguments(arguments)}{TURN_END}"


NAMES = re.compile(r"[^\W\d]\w*")  # of parameters
# A text's quotes are what it begins with. No part of it begins as another does.
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>(?P<quotes>'{3}|"{3}|'|")(?:\\.|(?!(?P=quotes))[^\\])*(?P=quotes))
        |(?P<constant>(?:True|true|False|false|None|null)\b)
        |(?P<name>[^\W\d]\w*)\s*=
        |(?P<number>-?\d[\d.eE+-]*)
        |(?P<mark>[][{}:,)])
    )""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtv0-7xuUN\n]|(?P<other>.))", re.DOTALL)


def read_arguments(code: str, at: int) -> tuple[dict[str, Any], int] | None:
    """The arguments of a call whose parenthesis ends at `at`, and the index behind the closing
    one; None: they are none. JSON's spelling of texts and constants may stand in them, too."""
    pieces, depth = ["{"], 0
    while token := _TOKEN.match(code, at):
        at, kind = token.end(), token.lastgroup
        found = token[kind or 0]
        closes = found in ("]", "}", ")")
        if closes and pieces[-1] == "," and pieces[-2] not in ("[", "{", ","):
            pieces.pop()  # Python lets one stand behind the last of several
        if found == ")":
            arguments = json_of("".join([*pieces, "}"]))
            return None if arguments is None or depth else (arguments, at)
        # Names of arguments stand outside of brackets, and colons inside.
        if (kind == "name" and depth) or (found == ":" and not depth):
            return None
        depth += (found in ("[", "{")) - closes
        written = _json(kind, found)
        if written is None:
            return None
        pieces.append(written)
    return None


def write_arguments(arguments: dict[str, Any]) -> str:
    """The arguments in Python's syntax."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _json(kind: str | None, token: str) -> str | None:
    """A token as JSON; None: it is a text that Python does not read either."""
    if kind == "name":
        return f"{json.dumps(token)}:"
    if kind == "constant":
        return CONSTANTS.get(token, token)
    if kind != "text" or json_of(token) is not None:
        return token
    try:
        # An escape that Python does not know is a backslash; it would warn of it.
        known = _ESCAPE.sub(lambda found: "\\" * bool(found["other"]) + found[0], token)
        return json.dumps(ast.literal_eval(known))
    except (SyntaxError, ValueError):
        return None


_PYTHON_START = "<|python_start|>"
_HEAD = re.compile(r"\s*([^\W\d][\w.-]*)\(")


class Pythonic(Buffered):
    """Reads [name(key='value'), ...]; each call comes when it is complete."""

    def __init__(self, tools: Tools) -> None:
        self._names = tools
        self._state = "begin"  # "calls", "text"

    def _take(self, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "begin":
            text = self._text.lstrip(SPACE).removeprefix(_PYTHON_START).lstrip(SPACE)
            if (call := self._call(text, "[")) is not None and call[0].name in self._names:
                self._state, self._text = "calls", call[1]
                parts.append(call[0])
            elif last or not self._may_begin():
                self._state = "text"
        while self._state == "calls" and (call := self._call(self._text, ",")) is not None:
            self._text = call[1]
            parts.append(call[0])
        if self._state == "text" or (self._state == "calls" and last):
            rest, self._text = self._text, ""
            if self._state == "calls":
                rest = rest.strip(SPACE).removeprefix("]").removesuffix("<|python_end|>")
            if rest:
                parts.append(rest)
        return parts

    def _call(self, text: str, mark: str) -> tuple[Call, str] | None:
        """A call after a mark, and the rest of the text."""
        text = text.lstrip(SPACE)
        if not text.startswith(mark) or (head := _HEAD.match(text, len(mark))) is None:
            return None
        if (found := read_arguments(text, head.end())) is None:
            return None
        return Call(head[1], json.dumps(found[0], ensure_ascii=False)), text[found[1] :]

    def _may_begin(self) -> bool:
        text = self._text.lstrip(SPACE)
        heads = [f"{tag}[{name}(" for tag in ("", _PYTHON_START) for name in self._names]
        return any(head.startswith(text) or text.startswith(head) for head in heads)


class CallEnds:
    """Finds the end of one call of a Gemma after the other, outside texts. Of a call that grows,
    only what is new is looked at."""

    def __init__(self, escape: str, end: str) -> None:
        self._escape, self._end = escape, end
        self._longest = max(len(escape), len(end))
        opens = "|".join(map(re.escape, (escape, '"', end)))
        # By what a text begins with, where its end is; "": outside.
        self._marks = {
            mark: re.compile(marks, re.DOTALL)
            for mark, marks in (("", opens), (escape, re.escape(escape)), ('"', r'\\.|"'))
        }
        self._at, self._inside = 0, ""  # position read so far, and its text

    def __call__(self, text: str) -> int:
        """-1: not yet."""
        # A quote may be part of an escape that has not come whole.
        size = len(text) - overlap(text, self._escape)
        while found := self._marks[self._inside].search(text, self._at, size):
            if found[0] == self._end:
                self._at = 0
                return found.start()
            self._at = found.end()
            if not found[0].startswith("\\"):
                self._inside = "" if self._inside else found[0]
        self._at = max(self._at, size - self._longest + 1)
        return -1


_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)


class GemmaMarks:
    """The marks of calls of a Gemma: call:name{key:ESCAPEtextESCAPE,other:1} between two."""

    def __init__(self, begin: str, end: str, escape: str) -> None:
        self.begin, self.end, self.escape = begin, end, escape
        around = re.escape(escape)
        self._token = re.compile(
            rf'{around}(?P<text>.*?){around}|(?P<json>"(?:[^"\\]|\\.)*")'
            r"|(?P<name>[^\W\d][\w.-]*)(?=\s*:)",
            re.DOTALL,
        )

    def parser(self, _: Tools) -> Parser:
        """Reads several, with texts between."""
        return Marked(CallEnds(self.escape, self.end), self._call, self.begin, self.end)

    def _call(self, text: str) -> Call | None:
        if (found := _GEMMA_CALL.fullmatch(text)) is None:
            return None
        arguments = json_of(self._token.sub(_gemma_token, found[2]))
        if not isinstance(arguments, dict):
            return None
        return Call(found[1], json.dumps(arguments, ensure_ascii=False))


GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")  # FunctionGemma
GEMMA4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')


def _gemma_token(found: re.Match[str]) -> str:
    if found["json"] is not None:
        return found["json"]
    return json.dumps(found["name"] if found["text"] is None else found["text"])
