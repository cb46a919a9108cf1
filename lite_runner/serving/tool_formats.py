"""How families of models write the calls of tools: read as they come, and as a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

from lite_runner.records import dataclass
from lite_runner.serving.grammars import json_rule
from lite_runner.system.json_file import parse_json

_BLOCK = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_TOOLS = re.compile(r"(?<![\w.'\"])tools(?![\w'\"])")
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Call:
    """A call that was read."""

    name: str
    arguments: str  # a JSON object


Part = str | Call  # text of the answer, or a call
Name = Literal["tags", "objects", "list", "lines"]


class Parser(Protocol):
    """Reads one answer. Text that is no call after all stays text."""

    def put(self, text: str) -> list[Part]:
        """What is certain now."""
        ...

    def finish(self) -> list[Part]:
        """The rest."""
        ...


@dataclass(frozen=True)
class Format:
    """How a model writes calls."""

    name: Name
    marks: tuple[str, ...]  # which may be tokens of their own
    parser: Callable[[Sequence[str]], Parser]  # of the names of the tools
    opening: str  # before the arguments; {name} is the tool's
    closing: str
    between: str | None = None  # two calls; None: one at a time
    whole: tuple[str, str] = ("", "")  # around all calls

    def grammar(
        self,
        tools: Iterable[tuple[str, dict[str, Any]]],
        spell: Callable[[str], str],
        several: bool,
    ) -> str:
        """At least one call, in Lark. `tools`: names and schemas of the arguments; `spell`: a text
        with marks in Lark."""
        rules, calls = [], []
        for number, (name, schema) in enumerate(tools):
            # Each schema is a rule of its own, so that "#" in it means itself.
            rules.append(f"arguments_{number}: {json_rule(schema)}")
            opening = self.opening.replace("{name}", name)
            calls.append(f"{spell(opening)} arguments_{number} {spell(self.closing)}")
        again = ""
        if several and self.between is not None:
            again = f"({spell(self.between)} call)*"
        begin, end = map(spell, self.whole)
        return "\n".join(
            [f"start: {begin} call {again} {end}", f"call: {' | '.join(calls)}", *rules]
        )


def format_of(template: str | None) -> Format | None:
    """Of a chat template; None: it does not know tools, or their form is not known here."""
    blocks = _BLOCK.findall(template or "")
    if template is None or not any(_TOOLS.search(block) for block in blocks):
        return None
    if "<tool_call>" in template and "<arg_key>" not in template:
        return FORMATS["tags"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["list"]
    if "[gMASK]" in template and "<|observation|>" in template:
        return FORMATS["lines"]
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return FORMATS["objects"]
    return None


class _Marked:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, between texts."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def __init__(self, _: Sequence[str]) -> None:
        self._text = ""  # not yet certain
        self._gap = ""  # white space before the call that is being read
        self._inside = self._called = False

    def put(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while True:
            before, mark, after = self._text.partition(self._END if self._inside else self._BEGIN)
            if not mark:
                break
            self._text = after
            if self._inside:
                parts += self._read(before, mark)
            else:
                certain = before.rstrip(_SPACE)
                self._gap = before[len(certain) :]
                parts += self._plain(certain)
            self._inside = not self._inside
        if not self._inside:
            held = _overlap(self._text, self._BEGIN)
            # White space may stand before a call, and is none of the text then.
            certain = self._text[: len(self._text) - held].rstrip(_SPACE)
            self._text = self._text[len(certain) :]
            parts += self._plain(certain)
        return parts

    def finish(self) -> list[Part]:
        rest, self._text = self._text, ""
        return self._read(rest, "") if self._inside else self._plain(rest)

    def _plain(self, text: str) -> list[Part]:
        blank = not text.strip(_SPACE)
        return [] if not text or (blank and self._called) else [text]

    def _read(self, text: str, end: str) -> list[Part]:
        call = _call(_json(text), "arguments")
        if call is None:
            return [f"{self._gap}{self._BEGIN}{text}{end}"]
        self._called = True
        return [call]


class _Whole:
    """Calls that are the whole answer: nothing is certain before its end, but that it is none."""

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


def _llama(_: Sequence[str]) -> Parser:
    """{"name": ..., "parameters": {...}}, several with semicolons between."""
    tag = "<|python_tag|>"

    def begins(text: str) -> bool:
        text = text.lstrip(_SPACE)
        return tag.startswith(text[: len(tag)]) or text.startswith("{")

    def read(text: str) -> list[Call] | None:
        text = text.strip(_SPACE).removeprefix(tag)
        calls, decoder = [], json.JSONDecoder()
        while text := text.lstrip(f"{_SPACE};"):
            try:
                found, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            call = _call(found, "parameters") or _call(found, "arguments")
            if call is None:
                return None
            calls.append(call)
            text = text[end:]
        return calls or None

    return _Whole(begins, read)


def _mistral(_: Sequence[str]) -> Parser:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}."""
    mark = "[TOOL_CALLS]"

    def begins(text: str) -> bool:
        return mark.startswith(text.lstrip(_SPACE)[: len(mark)])

    def read(text: str) -> list[Call] | None:
        text = text.strip(_SPACE)
        if not text.startswith(mark):
            return None
        listed = _json(text.removeprefix(mark))
        if isinstance(listed, list):
            calls = [_call(one, "arguments") for one in listed]
        else:
            calls = []
            for part in text.split(mark)[1:]:
                found = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[ARGS\])?(\{.*)", part, re.DOTALL)
                called = {"name": found[1], "arguments": _json(found[2])} if found else None
                calls.append(_call(called, "arguments"))
        known = [call for call in calls if call is not None]
        return known if known and len(known) == len(calls) else None

    return _Whole(begins, read)


def _glm4(names: Sequence[str]) -> Parser:
    """The tool's name, and its arguments in the next line."""
    lines = [f"{name}\n" for name in names]

    def begins(text: str) -> bool:
        text = text.lstrip(_SPACE)
        return any(line.startswith(text) or text.startswith(line) for line in lines)

    def read(text: str) -> list[Call] | None:
        name, _, arguments = text.lstrip(_SPACE).partition("\n")
        call = _call({"name": name, "arguments": _json(arguments)}, "arguments")
        return None if call is None else [call]

    return _Whole(begins, read)


def _json(text: str) -> Any:
    """None where it is no JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def _call(found: Any, key: str) -> Call | None:
    """A call of {"name", `key`}."""
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
        return None
    arguments = found.get(key)
    if not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may begin `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


_ARGUMENTS = '{"name": "{name}", "arguments": '
FORMATS: dict[Name, Format] = {
    "tags": Format(
        "tags",
        ("<tool_call>", "</tool_call>"),
        _Marked,
        f"<tool_call>\n{_ARGUMENTS}",
        "}\n</tool_call>",
        "\n",
    ),
    "objects": Format("objects", (), _llama, '{"name": "{name}", "parameters": ', "}"),
    "list": Format(
        "list", ("[TOOL_CALLS]",), _mistral, _ARGUMENTS, "}", ", ", ("[TOOL_CALLS][", "]")
    ),
    "lines": Format("lines", (), _glm4, "{name}\n", ""),
}
