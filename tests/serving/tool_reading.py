"""Reading with tool parsers, and matching with their grammars."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from random import Random
from typing import Any

from llguidance import LLMatcher

from lite_runner.serving.errors import ApiError
from lite_runner.serving.options import ToolParser as Name
from lite_runner.serving.tool_formats import FORMATS
from lite_runner.serving.tool_parsers import Call, More, Part, Tools
from lite_runner.structured.grammars import Grammar, GrammarError, Grammars
from lite_runner.text.tokenizer import byte_tokenizer

Read = tuple[str, list[tuple[str, dict[str, Any]]]]
_END = 257


def read(form: Name, pieces: Iterable[str], tools: Tools) -> Read:
    """The text and the calls in an answer, which comes in pieces."""
    parser = FORMATS[form].parser(tools)
    parts: list[Part] = [part for piece in pieces for part in parser.put(piece)]
    parts += parser.finish()
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, Call):
            calls.append((part.name, part.arguments))
        elif isinstance(part, More):
            name, arguments = calls[-1]
            calls[-1] = name, arguments + part.text
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [(name, loaded(arguments)) for name, arguments in calls]


def loaded(arguments: str) -> Any:
    """As they are, where a call breaks off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def read_however_cut(form: Name, output: str, tools: Tools) -> Read:
    """The same, however the answer is cut."""
    found = read(form, [output], tools)
    assert read(form, output, tools) == found
    for place in range(len(output)):
        assert read(form, [output[:place], output[place:]], tools) == found
    return found


class Allowed:
    """The bytes that a grammar allows a byte-level model."""

    def __init__(self, form: Name, tools: Tools, *, several: bool = False) -> None:
        """Raises ApiError or GrammarError where the grammar cannot be made."""
        schemas = [(name, {"type": "object", **schema}) for name, schema in tools.items()]
        lark = FORMATS[form].grammar(schemas, json.dumps, several)
        _grammars().compile(Grammar(lark, "tools"))
        self._matcher = LLMatcher(_grammars()._tokens(), lark, log_level=0)

    def __contains__(self, text: str) -> bool:
        walk = self.walk()
        return walk.take(text) and walk.over

    def walk(self) -> Walk:
        return Walk(self._matcher.deep_copy())


class Walk:
    """A way through a grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.text, self._matcher = "", matcher

    @property
    def over(self) -> bool:
        """True if the text so far is complete."""
        return bool(self._matcher.is_accepting())

    def take(self, piece: str) -> bool:
        """Go on with a text, where it may stand."""
        ids = [*piece.encode()]
        if self._matcher.validate_tokens(ids) < len(ids):
            return False
        self.text += piece
        return bool(self._matcher.consume_tokens(ids))

    def take_any(self, chance: Random) -> None:
        """Go on with a character of ASCII."""
        allowed = self._matcher.compute_logit_bias()
        assert self.take(chr(chance.choice([byte for byte in range(128) if allowed[byte]])))


def refusal(form: Name, schema: Mapping[str, Any]) -> str:
    """The reason why a call of a tool with this schema is not forced."""
    try:
        Allowed(form, {"x": schema})
    except (ApiError, GrammarError) as error:
        return error.message
    raise AssertionError("it is")


@cache
def _grammars() -> Grammars:
    return Grammars(byte_tokenizer(), 259, (_END,))
