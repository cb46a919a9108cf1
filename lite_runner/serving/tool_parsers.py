"""Parsers of tool calls, by families of models: hermes, llama_json, mistral, glm4, glm45,
qwen3_coder, chatglm3.

Each reads an answer as it comes, gives text as soon as it is certain, and holds back what may be a
call. A new one is a function from the tools of a request to a Parser, and a row in FORMATS of
tools.py.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lite_runner.records import dataclass
from lite_runner.system.json_file import parse_json
from lite_runner.text.thinking import overlap

SPACE = " \t\r\n"
Spell = Callable[[str], str]  # a text with marks in it, in Lark
Tools = Mapping[str, Mapping[str, Any]]  # names, and schemas of the arguments


@dataclass(frozen=True)
class Call:
    """A call that was read."""

    name: str
    arguments: str  # a JSON object


Part = str | Call  # text of the answer, or a call


class Parser(Protocol):
    """Reads one answer. Text that is no call after all stays text."""

    def put(self, text: str) -> list[Part]:
        """What is certain now."""
        ...

    def finish(self) -> list[Part]:
        """The rest."""
        ...


def json_of(text: str) -> Any:
    """None where it is no JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def call_of(found: Any, key: str) -> Call | None:
    """A call of {"name", `key`}."""
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
        return None
    arguments = found.get(key)
    if not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))


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


def llama_json(_: Tools) -> Parser:
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


KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKS = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)
KEYS = re.compile("[^<]+")
PARAMETER_NAMES = re.compile(r"[^<>\s]+")
PARAMETER_END, FUNCTION_END = "</parameter>", "</function>"


@dataclass(frozen=True)
class Tags:
    """How a call has its arguments one by one. The first groups are the tool's name and a key."""

    name: re.Pattern[str]
    key: re.Pattern[str]  # up to the value
    end: str  # of a value
    last: str = ""  # behind the arguments

    def json(self) -> re.Pattern[str]:
        """JSON, as far as its texts are concerned: the end of a value may stand in one. It does
        not backtrack, for no alternative begins as another does."""
        return re.compile(
            rf'\s*(?=[\[{{"])(?:[^"<]|"(?:[^"\\]|\\.)*"|<(?!{self.end[1:]}))*', re.DOTALL
        )


_GLM = Tags(
    re.compile(r"\s*([^\s<]+)"),
    re.compile(rf"\s*{KEY}({KEYS.pattern}){KEY_END}\s*{VALUE}"),
    VALUE_END,
)
_QWEN = Tags(
    re.compile(r"\s*<function=([^<>\s]+)>"),
    re.compile(rf"\s*<parameter=({PARAMETER_NAMES.pattern})>\n?"),
    PARAMETER_END,
    FUNCTION_END,
)


def glm45(tools: Tools) -> Parser:
    """Reads several, with texts between."""
    reader = _Reader(tools, _GLM)
    return Marked(reader.ends, reader.read)


def qwen3_coder(tools: Tools) -> Parser:
    """Reads several, with texts between. Values are in lines of their own."""
    reader = _Reader(tools, _QWEN)
    return Marked(reader.ends, reader.read)


class _Reader:
    """Reads what is between the marks of a call."""

    def __init__(self, tools: Tools, tags: Tags) -> None:
        self._types = {name: types_of(schema) for name, schema in tools.items()}
        self._tags, self._json = tags, tags.json()

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
        rest = text[at:].strip(SPACE)
        if not name or len(values) < len(pairs) or rest not in ("", self._tags.last):
            return None
        return Call(name, json.dumps(values, ensure_ascii=False))

    def _pairs(self, text: str) -> tuple[str, list[tuple[str, str]], int] | None:
        """The name, the keys and values, and where they end; None: a value has no end yet."""
        tags = self._tags
        if (begin := tags.name.match(text)) is None:
            return "", [], 0
        name, at, pairs = begin[1], begin.end(), []
        while pair := tags.key.match(text, at):
            end = self._value_end(text, pair.end(), self._allowed(name, pair[1]))
            if end < 0:
                return None
            value = text[pair.end() : end]
            pairs.append((pair[1], value.removesuffix("\n") if tags.last else value))
            at = end + len(tags.end)
        return name, pairs, at

    def _allowed(self, name: str, key: str) -> Types | None:
        """The types of a parameter; None: it is not known."""
        return self._types.get(name, {}).get(key)

    def _value_end(self, text: str, at: int, allowed: Types | None) -> int:
        """Of the value that begins at `at`; -1: nowhere yet."""
        end = self._tags.end
        if allowed != TEXT and (found := self._json.match(text, at)):
            return found.end() if text.startswith(end, found.end()) else -1
        return text.find(end, at)


def _value(text: str, allowed: Types | None) -> Any:
    """A text where it may be nothing else, or is no JSON, or JSON of a type that may not be."""
    if allowed == TEXT:
        return text
    if allowed is not None and "string" not in allowed:  # Python's constants are meant, too
        text = _CONSTANTS.get(text.strip(SPACE), text)
    value = json_of(text)
    if value is None and text.strip(SPACE) != "null":
        return text
    is_text = allowed is not None and "string" in allowed and type_of(value) not in allowed
    return text if is_text else value


TURN_TAG = "<|assistant|>"
TURN_BEGIN, TURN_END = "```python\ntool_call(", ")\n```"
_TURN_BEGINS = re.compile(r"\s*(?:```(?:python)?\s*)?tool_call\(")
_TURN_ENDS = re.compile(rf"\s*(?:```\s*|\Z|(?={re.escape(TURN_TAG)}))")


class ChatGLM3:
    """Reads an answer: texts stream, and from where a call may be all is held to its end."""

    def __init__(self, tools: Tools) -> None:
        self._names = tuple(tools)
        self._text = ""  # not yet certain
        self._fresh = True  # at the head of a turn

    def put(self, text: str) -> list[Part]:
        self._text += text
        return self._take(last=False)

    def finish(self) -> list[Part]:
        return self._take(last=True)

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
        """Whether the head is a tool's name, or may become one."""
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
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtv0-7xuUN\n]|(?P<other>.))", re.DOTALL)


def read_arguments(code: str, at: int) -> tuple[dict[str, Any], int] | None:
    """Of a call whose parenthesis ends at `at`, and where what follows the other one begins; None:
    they are none. JSON's spelling of texts and constants may stand in them, too."""
    made, depth = ["{"], 0
    while token := _TOKEN.match(code, at):
        at, kind = token.end(), token.lastgroup
        found = token[kind or 0]
        closes = found in ("]", "}", ")")
        if closes and made[-1] == "," and made[-2] not in ("[", "{", ","):
            made.pop()  # Python lets one stand behind the last of several
        if found == ")":
            arguments = json_of("".join([*made, "}"]))
            return None if arguments is None or depth else (arguments, at)
        # Names of arguments stand outside of brackets, and colons inside.
        if (kind == "name" and depth) or (found == ":" and not depth):
            return None
        depth += (found in ("[", "{")) - closes
        written = _json(kind, found)
        if written is None:
            return None
        made.append(written)
    return None


def write_arguments(arguments: dict[str, Any]) -> str:
    """As Python spells them."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _json(kind: str | None, token: str) -> str | None:
    """A token as JSON; None: it is a text that Python does not read either."""
    if kind == "name":
        return f"{json.dumps(token)}:"
    if kind == "constant":
        return _CONSTANTS.get(token, token)
    if kind != "text" or json_of(token) is not None:
        return token
    try:
        # An escape that Python does not know is a backslash; it would warn of it.
        known = _ESCAPE.sub(lambda found: "\\" * bool(found["other"]) + found[0], token)
        return json.dumps(ast.literal_eval(known))
    except (SyntaxError, ValueError):
        return None


Types = frozenset[str]  # of JSON values
TEXT: Types = frozenset(("string",))
_ANY = frozenset(("string", "number", "boolean", "null", "object", "array"))
_NAMES = {"str": "string", "bool": "boolean", "NoneType": "null", "dict": "object", "list": "array"}
_MOST_REFERENCES = 8  # one after the other


def types_of(tool: Mapping[str, Any]) -> dict[str, Types]:
    """The JSON types that each parameter of a tool's schema may have."""
    listed = tool.get("properties")
    if not isinstance(listed, dict):
        return {}
    return {name: types(resolved(schema, tool)) for name, schema in listed.items()}


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


def resolved(schema: Any, tool: Mapping[str, Any]) -> dict[str, Any]:
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
