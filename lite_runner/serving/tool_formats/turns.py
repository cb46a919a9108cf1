"""Calls of ChatGLM3: turns of the assistant, whose head is the tool's name.

<|assistant|> get_weather
 ```python
tool_call(city='Oslo', days=3)
```

A turn without a name in its head is text. The model ends its answer behind the call, with the tag
of the next turn. The tag of its own is a token that no text spells, and never part of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lite_runner.serving.grammars import json_rule
from lite_runner.serving.tool_formats.calls import SPACE, Call, Part, Spell, Tools, overlap
from lite_runner.serving.tool_formats.parameters import parameters
from lite_runner.serving.tool_formats.python_call import NAMES, read_arguments, write_arguments

TAG = "<|assistant|>"
BEGIN, END = "```python\ntool_call(", ")\n```"
_BEGINS = re.compile(r"\s*(?:```(?:python)?\s*)?tool_call\(")
_ENDS = re.compile(rf"\s*(?:```\s*|\Z|(?={re.escape(TAG)}))")


class Turns:
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
            before, tag, after = self._text.partition(TAG)
            certain = before if tag or last else before[: len(before) - overlap(before, TAG)]
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
        if (begins := _BEGINS.match(code)) is None:
            return None
        if (found := read_arguments(code, begins.end())) is None:
            return None
        arguments, at = found
        if (ends := _ENDS.match(code, at)) is None:
            return None
        self._text = code[ends.end() :]
        return Call(head.strip(SPACE), json.dumps(arguments, ensure_ascii=False))


def turn_rules(rule: str, tool: Mapping[str, Any], spell: Spell) -> list[str]:
    """The arguments of a tool. See Format."""
    listed = parameters(tool, NAMES)
    first, rules = [], [f'{rule}_from_{len(listed)}: ""']
    for number, one in enumerate(listed):
        pair, rest = f"{rule}_{number}", f"{rule}_from_{number + 1}"
        again = "" if one.required else "?"
        rules += [
            f"{pair}: {spell(f'{one.name}=')} {pair}_value",
            f"{pair}_value: {json_rule(one.schema)}",
            f"{rule}_from_{number}: ({spell(', ')} {pair}){again} {rest}",
        ]
        if not any(before.required for before in listed[:number]):
            first.append(f"{pair} {rest}")
    if not any(one.required for one in listed):
        first.append('""')
    return [f"{rule}: {' | '.join(first)}", *rules]


def written(arguments: dict[str, Any]) -> str:
    """A call in a turn of its own, but for its head."""
    return f"{BEGIN}{write_arguments(arguments)}{END}"
