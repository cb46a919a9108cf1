"""What a parser of calls gives, and what all of them need."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lite_runner.records import dataclass
from lite_runner.system.json_file import parse_json

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


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may begin `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
