"""The forms of calls by name, and which one a model has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from lite_runner.records import dataclass
from lite_runner.serving.grammars import json_rule
from lite_runner.serving.tool_formats import turns
from lite_runner.serving.tool_formats.calls import Parser, Spell, Tools
from lite_runner.serving.tool_formats.marked import BEGIN, END, hermes
from lite_runner.serving.tool_formats.pair_rules import pair_rules
from lite_runner.serving.tool_formats.pairs import MARKS, glm45
from lite_runner.serving.tool_formats.whole import glm4, llama, mistral
from lite_runner.text.chatglm_chat import ChatForm

_BLOCK = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_TOOLS = re.compile(r"(?<![\w.'\"])tools(?![\w'\"])")
Name = Literal["tags", "objects", "list", "lines", "pairs", "turns"]


def _json_rules(rule: str, schema: Mapping[str, Any], _: Spell) -> list[str]:
    """An object. Each schema is a rule of its own, so that "#" in it means itself."""
    return [f"{rule}: {json_rule(schema)}"]


def _json_text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Format:
    """How a model writes calls. `arguments`: rules in Lark, of which the first is named, for the
    arguments of a tool with a schema."""

    name: Name
    marks: tuple[str, ...]  # which may be tokens of their own
    parser: Callable[[Tools], Parser]
    opening: str  # before the arguments; {name} is the tool's
    closing: str
    between: str | None = None  # two calls; None: one at a time
    whole: tuple[str, str] = ("", "")  # around all calls
    arguments: Callable[[str, Mapping[str, Any], Spell], list[str]] = _json_rules
    # A call in a turn of its own, with the tool's name for its head; None: the template writes it.
    turn: Callable[[dict[str, Any]], str] | None = None

    def grammar(
        self,
        tools: Iterable[tuple[str, dict[str, Any]]],
        spell: Spell,
        several: bool,
    ) -> str:
        """At least one call, in Lark. `tools`: names and schemas of the arguments."""
        rules, calls = [], []
        for number, (name, schema) in enumerate(tools):
            rules += self.arguments(f"arguments_{number}", schema, spell)
            opening = self.opening.replace("{name}", name)
            calls.append(f"{spell(opening)} arguments_{number} {spell(self.closing)}")
        again = ""
        if several and self.between is not None:
            again = f"({spell(self.between)} call)*"
        begin, end = map(spell, self.whole)
        return "\n".join(
            [f"start: {begin} call {again} {end}", f"call: {' | '.join(calls)}", *rules]
        )


def format_of(template: str | None, chat_form: ChatForm | None = None) -> Format | None:
    """Of a chat template, or of a form of chats that needs none; None: it does not know tools, or
    how the model calls them is not known here."""
    if template is None and chat_form == "chatglm3":
        return FORMATS["turns"]
    blocks = _BLOCK.findall(template or "")
    if template is None or not any(_TOOLS.search(block) for block in blocks):
        return None
    if "<tool_call>" in template:
        return FORMATS["pairs" if "<arg_key>" in template else "tags"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["list"]
    if "[gMASK]" in template and "<|observation|>" in template:
        return FORMATS["lines"]
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return FORMATS["objects"]
    return None


_ARGUMENTS = '{"name": "{name}", "arguments": '
FORMATS: dict[Name, Format] = {
    "tags": Format(
        "tags", (BEGIN, END), hermes, f"{BEGIN}\n{_ARGUMENTS}", f"}}\n{END}", between="\n"
    ),
    "objects": Format("objects", (), llama, '{"name": "{name}", "parameters": ', "}"),
    "list": Format(
        "list", ("[TOOL_CALLS]",), mistral, _ARGUMENTS, "}", ", ", ("[TOOL_CALLS][", "]")
    ),
    "lines": Format("lines", (), glm4, "{name}\n", "", turn=_json_text),
    "pairs": Format(
        "pairs", MARKS, glm45, f"{BEGIN}{{name}}", END, between="\n", arguments=pair_rules
    ),
    # A sentencepiece vocabulary begins each text with a space.
    "turns": Format(
        "turns",
        (turns.TAG,),
        turns.Turns,
        f" {{name}}\n {turns.BEGIN}",
        turns.END,
        arguments=turns.turn_rules,
        turn=turns.written,
    ),
}
