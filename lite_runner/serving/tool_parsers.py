"""Parsers of tool calls: JSON, and arguments one by one in tags; see tool_code.py for code.

Each reads an answer as it comes, gives text as soon as it is certain, and holds back what may be a
call. A new one is a function from the tools of a request to a Parser, and a row in FORMATS of
tool_formats.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from lite_runner.records import dataclass
from lite_runner.system.files import parse_json
from lite_runner.text.thinking import overlap

SPACE = " \t\r\n"
Spell = Callable[[str], str]  # a text with marks in it, in Lark
Tools = Mapping[str, Mapping[str, Any]]  # names, and schemas of the arguments


@dataclass(frozen=True)
class Call:
    """A call that was read; more of its arguments may follow as More."""

    name: str
    arguments: str  # a JSON object, or its beginning


@dataclass(frozen=True)
class More:
    """More of the arguments of the newest call."""

    text: str


Part = str | Call | More  # text of the answer, or of a call


class Parser(Protocol):
    """Reads one answer. Text that is no call after all stays text."""

    def put(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        ...

    def finish(self) -> list[Part]:
        """The rest."""
        ...


class Buffered:
    """A parser that keeps the text which is not yet certain."""

    _text = ""

    def put(self, text: str) -> list[Part]:
        self._text += text
        return self._take(last=False)

    def finish(self) -> list[Part]:
        return self._take(last=True)

    def _take(self, *, last: bool) -> list[Part]:
        """The parts of the text that are certain, which are removed from it; `last`: all of
        it is."""
        raise NotImplementedError


def json_of(text: str) -> Any:
    """None where it is no JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None


BEGIN, END = "<tool_call>", "</tool_call>"


class Marked:
    """Reads calls between marks, several; arguments that are read one by one come one by one, other
    calls when they are complete."""

    def __init__(
        self,
        ends: Callable[[str], int],
        read: Callable[[str], Call | None],
        begin: str = BEGIN,
        end: str = END,
        arguments: Callable[[str], tuple[str, list[tuple[str, Any]]]] | None = None,
    ) -> None:
        """`ends`: where in the text after `begin` the `end` of the call is, -1: nowhere yet;
        `read`: the call of what is between them; `arguments`: the tool, and what has come, of one
        that is not complete."""
        self._ends, self._read, self._begin, self._end = ends, read, begin, end
        self._arguments = arguments
        self._given = 0  # arguments given of the call that is being read
        self._text = ""  # not yet certain
        self._gap = ""  # white space before the call that is being read
        self._inside = self._called = False

    def put(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while (place := self._next()) >= 0:
            before, mark = self._text[:place], self._end if self._inside else self._begin
            self._text = self._text[place + len(mark) :]
            if self._inside:
                parts += self._call(before, mark)
            else:
                certain = before.rstrip(SPACE)
                self._gap = before[len(certain) :]
                parts += self._plain(certain)
            self._inside = not self._inside
        if not self._inside:
            held = overlap(self._text, self._begin)
            # White space may stand before a call, and is none of the text then.
            certain = self._text[: len(self._text) - held].rstrip(SPACE)
            self._text = self._text[len(certain) :]
            parts += self._plain(certain)
        else:
            parts += self._more(self._text)
        return parts

    def finish(self) -> list[Part]:
        rest, self._text = self._text, ""
        return self._call(rest, "") if self._inside else self._plain(rest)

    def _next(self) -> int:
        return self._ends(self._text) if self._inside else self._text.find(self._begin)

    def _plain(self, text: str) -> list[Part]:
        blank = not text.strip(SPACE)
        return [] if not text or (blank and self._called) else [text]

    def _more(self, text: str) -> list[Part]:
        """Arguments that have come since."""
        name, pairs = self._arguments(text) if self._arguments else ("", [])
        parts: list[Part] = []
        for key, value in pairs[self._given :]:
            if not self._given:
                parts.append(Call(name, ""))
            written = json.dumps({key: value}, ensure_ascii=False)[1:-1]
            parts.append(More(f", {written}" if self._given else f"{{{written}"))
            self._given += 1
        return parts

    def _call(self, text: str, end: str) -> list[Part]:
        call, parts = self._read(text), self._more(text)
        if self._given:
            self._given, self._called = 0, True
            return [*parts, More("}")] if call or end else parts
        if call is None:
            return [f"{self._gap}{self._begin}{text}{end}"]
        self._called = True
        return [call]


@dataclass(frozen=True)
class JsonForm:
    """The form of calls whose arguments are JSON."""

    marks: tuple[str, ...]  # before calls; (): an answer of calls begins with one
    header: re.Pattern[str]  # before the arguments, with the tool's name
    end: str = ""  # behind calls; "": the end of the answer
    closing: re.Pattern[str] = re.compile(r"[\s}\]]*")  # behind arguments
    # Without marks: True if a text may be the beginning of calls.
    begins: Callable[[str, Tools], bool] | None = None


class _JsonObject:
    """Progress within a JSON object."""

    def __init__(self) -> None:
        self._depth, self._inside, self._escaped = 0, False, False

    def end(self, text: str) -> int:
        """The end of the object in the next text; -1: not in it."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._inside:
                self._escaped, self._inside = character == "\\", character != '"'
            elif character == '"':
                self._inside = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return -1


def _calls_of(text: str) -> list[Call] | None:
    """Calls in any family's keys, in a list or one behind the other; None: there is more in it."""
    calls: list[Call] = []
    while text := text.lstrip(f"{SPACE},;[]}}"):
        end = max(_JsonObject().end(text), 0)
        if not isinstance(found := json_of(text[:end]), dict):
            return None
        name = found.get("name", found.get("tool_name"))
        arguments = found.get("arguments", found.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
        text = text[end:]
    return calls


class JsonCalls(Buffered):
    """Reads calls whose arguments are JSON, which stream once the name of a tool is read."""

    def __init__(self, form: JsonForm, tools: Tools) -> None:
        self._form, self._names = form, tools
        self._mark = self._gap = ""  # before the call that is being read, the mark and white space
        self._called = False  # a call has come
        self._object = _JsonObject()  # of the call that is being read
        self._opened = False  # its arguments are within an object
        self._state = self._outside if form.marks else self._head

    def _take(self, *, last: bool) -> list[Part]:
        parts: list[Part] = []
        before: object = None
        while before != (now := (self._state, len(self._text))):
            before = now
            parts += self._state(last)
        return parts

    def _outside(self, last: bool) -> list[Part]:
        """Text, up to a mark."""
        places = [(at, mark) for mark in self._form.marks if (at := self._text.find(mark)) >= 0]
        if places:
            at, self._mark = min(places)
            before, self._text = self._text[:at], self._text[at + len(self._mark) :]
            certain = before.rstrip(SPACE)
            self._gap, self._state = before[len(certain) :], self._head
        else:
            held = max((overlap(self._text, mark) for mark in self._form.marks), default=0)
            certain = self._text[: len(self._text) - held]
            # White space may stand before a call, and is none of the text then.
            certain = self._text if last else certain.rstrip(SPACE)
            self._text = self._text[len(certain) :]
        blank = not certain.strip(SPACE)
        return [] if not certain or (blank and self._called) else [certain]

    def _head(self, last: bool) -> list[Part]:
        """The parts of a possible call, up to its arguments."""
        form, text = self._form, self._text
        if (found := form.header.match(text)) and found["name"] in self._names:
            return self._begin(text, found)
        place = text.find(form.end) if form.end else -1
        if place < 0 and not last and (form.begins is None or form.begins(text, self._names)):
            return []
        section, end = (text, "") if place < 0 else (text[:place], form.end)
        self._text, self._state = text[len(section) + len(end) :], self._outside
        if (end or last) and (calls := self._whole(section)):
            self._called = True
            return [*calls]
        head = f"{self._gap}{self._mark}{section}{end}"
        return [head] if head else []

    def _begin(self, text: str, found: re.Match[str]) -> list[Part]:
        self._text, self._opened = text[found.end() :], "{" in found[0]
        self._state, self._object, self._called = self._arguments, _JsonObject(), True
        return [Call(found["name"], "")]

    def _arguments(self, last: bool) -> list[Part]:
        end = self._object.end(self._text)
        if end >= 0:
            self._state = self._behind
        arguments = self._text if end < 0 else self._text[:end]
        self._text = self._text[len(arguments) :]
        return [More(arguments)] if arguments else []

    def _behind(self, last: bool) -> list[Part]:
        """The parts behind the arguments: another call, or the end."""
        form, text = self._form, self._text
        closing = form.closing.match(text)
        begin = closing.end() if closing else 0
        if found := form.header.match(text[begin:]):
            return self._begin(text[begin:], found)
        place = text.find(form.end, begin) if form.end else -1
        if place < 0 and not last:
            return []
        section, end = (text, "") if place < 0 else (text[:place], form.end)
        self._text, self._state = text[len(section) + len(end) :], self._outside
        rest = section[begin:]
        if not rest.strip(SPACE) or (not end and form.end.startswith(rest)):
            return []
        calls = None
        if self._opened:  # More keys of the object may follow, and calls in another order of keys.
            own = f'{{"":0{section}'
            size = max(_JsonObject().end(own), 0)
            calls = _calls_of(own[size:]) if json_of(own[:size]) else None
        return [rest] if calls is None else [*calls]

    def _whole(self, section: str) -> list[Call] | None:
        """The calls in the text between the marks; None: it has none."""
        if listed := _calls_of(section):
            return listed
        calls, at, form = [], 0, self._form
        while found := form.header.match(section, at):
            end = found.end() + _JsonObject().end(section[found.end() :])
            arguments = json_of(section[found.end() : end])
            if end < found.end() or not isinstance(arguments, dict):
                return None
            calls.append(Call(found["name"], section[found.end() : end]))
            closing = form.closing.match(section, end)
            at = closing.end() if closing else end
        return calls if calls and not section[at:].strip(SPACE) else None


def _json_form(before: str, *marks: str, **more: Any) -> JsonForm:
    """The form of calls that are objects with a name; `before`: a regex that also takes the white
    space after it, since two adjacent runs of it would backtrack."""
    keys = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
    return JsonForm(marks, re.compile(rf"\s*{before}{keys}"), **more)


_PYTHON_TAG = "<|python_tag|>"


def _begins_with_object(text: str, _: Tools) -> bool:
    text = text.lstrip(f"{SPACE};")
    return _PYTHON_TAG.startswith(text[: len(_PYTHON_TAG)]) or text.startswith("{")


def _begins_with_name(text: str, tools: Tools) -> bool:
    text = text.lstrip(SPACE)
    return any(f"{name}\n".startswith(text) or text.startswith(f"{name}\n") for name in tools)


HERMES = _json_form("", BEGIN, end=END)
LLAMA3 = _json_form(
    rf"(?:{re.escape(_PYTHON_TAG)}\s*)?(?:;\s*)?",
    begins=_begins_with_object,
    closing=re.compile(r"\s*\}?\s*"),
)
GRANITE = _json_form(r"(?:[\[,]\s*)?", "<|tool_call|>", "<tool_call>")
PHI4 = _json_form(r"(?:[\[,]\s*)?", "functools", "<|tool_call|>", end="<|/tool_call|>")
NEMOTRON = _json_form(r"(?:[\[,]\s*)?", "<TOOLCALL>", end="</TOOLCALL>")
HUNYUAN = _json_form(r"(?:[\[,]\s*)?", "<tool_calls>", end="</tool_calls>")
COHERE = JsonForm(
    ("<|START_ACTION|>",),
    re.compile(
        r'\s*(?:[\[,]\s*)?\{\s*(?:"tool_call_id"\s*:\s*"[^"\\]*"\s*,\s*)?'
        r'"tool_name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"parameters"\s*:\s*(?=\{)'
    ),
    "<|END_ACTION|>",
)
# In a list, or each behind a mark of its own.
MISTRAL = JsonForm(
    ("[TOOL_CALLS]",),
    re.compile(
        r'\s*(?:\[TOOL_CALLS\]\s*)?(?:(?:[\[,]\s*)?\{\s*"name"\s*:\s*")?(?P<name>[\w.-]+)'
        r'(?:"\s*,\s*"arguments"\s*:\s*|\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?)(?=\{)'
    ),
)
GLM4 = JsonForm(
    (),
    re.compile(r"\s*(?P<name>[^\n{]+)\n\s*(?=\{)"),
    closing=re.compile(r"\s*"),
    begins=_begins_with_name,
)
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI = JsonForm(
    (KIMI_BEGIN,),
    re.compile(
        rf"\s*{re.escape(KIMI_CALL)}\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*"
        rf"{re.escape(KIMI_ARGUMENTS)}\s*(?=\{{)"
    ),
    KIMI_END,
    re.compile(rf"\s*(?:{re.escape(KIMI_CALL_END)})?\s*"),
)
DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL, DEEPSEEK_SEP, DEEPSEEK_CALL_END = (
    f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")  # a wide bar, and what stands for a space
    for name in (
        *("tool calls begin", "tool calls end"),
        *("tool call begin", "tool sep", "tool call end"),
    )
)
DEEPSEEK = JsonForm(
    (DEEPSEEK_BEGIN,),
    re.compile(
        rf"\s*{DEEPSEEK_CALL}(?:function{DEEPSEEK_SEP}(?=[^{{]*```json))?(?P<name>[\w.-]+)\s*"
        rf"(?:```json|{DEEPSEEK_SEP})\s*(?=\{{)"
    ),
    DEEPSEEK_END,
    re.compile(rf"\s*(?:```)?\s*(?:{DEEPSEEK_CALL_END})?\s*"),
)
HARMONY = JsonForm(
    ("<|channel|>commentary", "<|start|>assistant to="),
    re.compile(
        r"\s*(?:to=)?functions\.(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+\s*)?"
        r"(?:<\|constrain\|>\s*)?(?:json\s*)?<\|message\|>\s*(?=\{)"
    ),
    "<|call|>",
    re.compile(r"\s*"),
)

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKS = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)
KEYS = re.compile("[^<]+")
PARAMETER_NAMES = re.compile(r"[^<>\s]+")
PARAMETER_END, FUNCTION_END = "</parameter>", "</function>"


@dataclass(frozen=True)
class Tags:
    """The form of calls that tag their arguments one by one. The first groups are the tool's
    name and a key."""

    name: re.Pattern[str]
    key: re.Pattern[str]  # up to the value
    end: str  # of a value
    last: str = ""  # behind the arguments
    lines: bool = False  # values are in lines of their own

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
    lines=True,
)
_SEED = replace(_QWEN, key=re.compile(rf"\s*<parameter=({PARAMETER_NAMES.pattern})>"), lines=False)
SEED_BEGIN, SEED_END = "<seed:tool_call>", "</seed:tool_call>"


def glm45(tools: Tools) -> Parser:
    """Reads several, with texts between."""
    reader = _Reader(tools, _GLM)
    return Marked(reader.ends, reader.read, arguments=reader.arguments)


def qwen3_coder(tools: Tools) -> Parser:
    """Reads several, with texts between. Values are in lines of their own."""
    reader = _Reader(tools, _QWEN)
    return Marked(reader.ends, reader.read, arguments=reader.arguments)


def seed_oss(tools: Tools) -> Parser:
    """Reads several, with texts between."""
    reader = _Reader(tools, _SEED, SEED_END)
    return Marked(reader.ends, reader.read, SEED_BEGIN, SEED_END, reader.arguments)


class _Reader:
    """Reads the text between the marks of a call."""

    def __init__(self, tools: Tools, tags: Tags, end: str = END) -> None:
        self._types = {name: types_of(schema) for name, schema in tools.items()}
        self._end = end
        self._tags, self._json = tags, tags.json()
        # Of `arguments`, as long as no more values have ended.
        self._ends, self._before = 0, ""
        self._arguments: tuple[str, list[tuple[str, Any]]] = "", []

    def ends(self, text: str) -> int:
        """The position of the end mark outside values; -1: not yet."""
        if self._end not in text:
            return -1
        _, _, at, whole = self._pairs(text)
        return text.find(self._end, at) if whole else -1

    def read(self, text: str) -> Call | None:
        """None: it is no call."""
        name, pairs, at, whole = self._pairs(text)
        values = {key: _value(value, self._allowed(name, key)) for key, value in pairs}
        rest = text[at:].strip(SPACE)
        if not whole or not name or len(values) < len(pairs) or rest not in ("", self._tags.last):
            return None
        return Call(name, json.dumps(values, ensure_ascii=False))

    def arguments(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        """The tool, if it is known, and its arguments that have come, up to one that has before."""
        if (ends := text.count(self._tags.end)) == self._ends and text.startswith(self._before):
            return self._arguments
        self._ends, self._before = ends, text
        name, pairs, _, _ = self._pairs(text)
        values: dict[str, Any] = {}
        for key, value in pairs if name in self._types else ():
            if key in values:
                break
            values[key] = _value(value, self._allowed(name, key))
        self._arguments = name, list(values.items())
        return self._arguments

    def _pairs(self, text: str) -> tuple[str, list[tuple[str, str]], int, bool]:
        """The name, the keys and values, where they end, and whether no value has no end yet."""
        tags = self._tags
        if (begin := tags.name.match(text)) is None:
            return "", [], 0, True
        name, at = begin[1], begin.end()
        pairs: list[tuple[str, str]] = []
        while pair := tags.key.match(text, at):
            end = self._value_end(text, pair.end(), self._allowed(name, pair[1]))
            if end < 0:
                return name, pairs, at, False
            value = text[pair.end() : end]
            pairs.append((pair[1], value.removesuffix("\n") if tags.lines else value))
            at = end + len(tags.end)
        return name, pairs, at, True

    def _allowed(self, name: str, key: str) -> Types | None:
        """The types of a parameter; None: it is not known."""
        return self._types.get(name, {}).get(key)

    def _value_end(self, text: str, at: int, allowed: Types | None) -> int:
        """The end of the value that begins at `at`; -1: not yet."""
        end = self._tags.end
        if allowed != TEXT and (found := self._json.match(text, at)):
            return found.end() if text.startswith(end, found.end()) else -1
        return text.find(end, at)


CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # Python's, in JSON


def _value(text: str, allowed: Types | None) -> Any:
    """A text where it may be nothing else, or is no JSON, or JSON of a type that may not be."""
    if allowed == TEXT:
        return text
    if allowed is not None and "string" not in allowed:  # Python's constants are meant, too
        text = CONSTANTS.get(text.strip(SPACE), text)
    value = json_of(text)
    if value is None and text.strip(SPACE) != "null":
        return text
    is_text = allowed is not None and "string" in allowed and type_of(value) not in allowed
    return text if is_text else value


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
    return _NAMES.get(type(value).__name__, "number")


def resolved(schema: Any, tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with its references resolved; {}: it allows anything."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(named := schema.get("$ref"), str):
            break
        found: Any = tool
        for step in named.removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**found, **beside} if isinstance(found, dict) else beside
    return schema if isinstance(schema, dict) else {}
