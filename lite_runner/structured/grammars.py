"""Grammars that restrict an answer, and their masks over tokens by llguidance.

A grammar may be a stranger's text. Its length, the repeats of its patterns and llguidance's own
limits bound what compiling it and each mask may take; a grammar that needs more is refused, or ends
its own request, and nobody else's.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from lite_runner.errors import ConfigError
from lite_runner.generation import Guide
from lite_runner.records import dataclass
from lite_runner.system.files import parse_json
from lite_runner.text.tokenizer import Tokenizer

MAX_CHARS = 1 << 16  # characters of a grammar
MAX_MULTIPLE = 10_000  # of multipleOf, whose automaton has as many states
MOST_REPEATS = 10_000  # product of nested repeats: an automaton has as many copies of the part
# A class may hold others, and braces spaces, as llguidance reads them.
_PART = re.compile(
    r"\\.|\[\^?\]?(?:\\.|\[[^\]]*\]|[^\]\\])*\]|\(|\)|\{\s*(\d+)\s*(,?)\s*(\d*)\s*\}|[^\\]",
    re.DOTALL,
)
# At most one space where JSON allows white space: a run of them need not end.
_JSON_OPTIONS = {"whitespace_pattern": "[ ]?"}
_ASCII = "dw"  # \\d and \\w are ASCII, as in JavaScript and JSON schemas
_MOST_SAID = 300  # characters of llguidance's messages, which may quote the grammar
_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,  # some 6 ms
    step_lexer_fuel=100_000,  # some 7 ms
    step_max_items=20_000,
    max_lexer_states=20_000,  # some 2 KiB each
    max_grammar_size=100_000,
    verbose_errors=False,
)
_OBJECT = {"type": "object"}


class GrammarError(ConfigError):
    """A grammar is invalid or too costly, or leaves no token to continue an answer."""

    def __init__(self, field: str, message: str) -> None:
        """`field`: of the request that has the grammar."""
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class Grammar:
    """The grammar of an answer: llguidance's Lark, and the request's field that asks for it."""

    lark: str
    field: str
    schemas: tuple[Any, ...] = ()  # JSON schemas in it
    patterns: tuple[str, ...] = ()  # regexes in it


def grammar_of(asked: Mapping[str, Any]) -> Grammar | None:
    """The grammar of an answer; None: unrestricted.

    `asked`: response_format, guided_json, guided_regex, guided_choice and structured_outputs as
    plain data, of the right types; null, or none at all, where they are not asked for. Raises
    GrammarError for two grammars.
    """
    found = list(_grammars(asked))
    if len(found) > 1:
        raise GrammarError(found[1].field, f"cannot be combined with {found[0].field}")
    return found[0] if found else None


def _grammars(asked: Mapping[str, Any]) -> Iterator[Grammar]:
    outputs = _mapping(asked.get("structured_outputs"), "structured_outputs")
    named = {f"structured_outputs.{name}": value for name, value in outputs.items()}
    for field, value in {**asked, **named}.items():
        kind = field.removeprefix("guided_").removeprefix("structured_outputs.")
        if value is None:
            continue
        if kind == "json":
            yield of_schema(_mapping(value, field), field)
        elif kind == "regex":
            yield of_regex(value, field)
        elif kind == "choice":
            yield of_choices(value, field)
        elif kind == "json_object" and value:
            yield of_schema(_OBJECT, field)
        elif kind == "response_format":
            wanted = _mapping(value, field)
            if wanted["type"] == "json_schema":
                yield of_schema(wanted["json_schema"]["schema"], field)
            elif wanted["type"] == "json_object":
                yield of_schema(_OBJECT, field)


def _mapping(given: Mapping[str, Any] | str | None, field: str) -> Mapping[str, Any]:
    """A JSON object, which may be JSON in a text."""
    if not isinstance(given, str):
        return given or {}
    try:
        found = parse_json(given)
    except ValueError as error:
        raise GrammarError(field, f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise GrammarError(field, "expected a JSON object")
    return found


def of_schema(schema: Mapping[str, Any], field: str) -> Grammar:
    """JSON that a schema allows. Raises GrammarError for one that is nested too deep."""
    try:
        return Grammar(f"start: {json_rule(schema)}", field, (schema,))
    except RecursionError:
        raise GrammarError(field, "nested too deep") from None


def of_regex(pattern: str, field: str) -> Grammar:
    """Texts that a regex matches as a whole."""
    return Grammar(f"start: {regex_terminal(pattern)}", field, patterns=(pattern,))


def of_choices(choices: Sequence[str], field: str) -> Grammar:
    """One of several texts."""
    listed = "|".join(re.escape(choice) for choice in choices)
    return Grammar(f"start: /{regex_to_lark(listed, '')}/", field)


def json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def regex_terminal(pattern: str) -> str:
    """A Lark terminal for texts that a regex matches as a whole."""
    return f"/{regex_to_lark(pattern, _ASCII)}/"


def check(grammar: Grammar) -> None:
    """Check a grammar without a vocabulary. Raises GrammarError."""
    error = _error(grammar)
    if error is None:
        error = _error_line(LLMatcher.validate_grammar(grammar.lark, limits=_LIMITS))
    if error:
        raise GrammarError(grammar.field, error)


class Grammars:
    """Compiles grammars for one tokenizer. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int]) -> None:
        """`vocab`: scores of a token; `ends`: the tokens that end an answer."""
        self._tokenizer, self._size = tokenizer, vocab
        self._ends = [token for token in ends if token < vocab]
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> Callable[[], Guide]:
        """Guides of a grammar. Raises GrammarError for one that is wrong, or takes too much."""
        error = self._lack() or _error(grammar)
        if error is None:
            matcher = LLMatcher(self._tokens(), grammar.lark, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first mask costs the most, and may have no token
            if not matcher.is_error():
                return lambda: _Guide(matcher.deep_copy(), grammar.field)
            error = _error_line(matcher.get_error())
        raise GrammarError(grammar.field, error)

    def _lack(self) -> str | None:
        """The reason why the tokenizer cannot use grammars; None: it can."""
        if self._tokenizer.spelling is not None and self._ends:
            return None
        what = "has no end token" if self._ends == [] else "does not spell tokens in bytes"
        return f"not supported: {self._tokenizer.source} {what}"

    def _tokens(self) -> LLTokenizer:
        with self._lock:  # built once, which takes a second
            if self._vocabulary is None:
                spelled = TokenizerWrapper(_Spelled(self._tokenizer, self._size, self._ends[0]))
                self._vocabulary = LLTokenizer(spelled, self._size, self._ends)
            return self._vocabulary


@lru_cache(maxsize=1)  # building takes a second
def compiler_for(tokenizer: Tokenizer, vocab: int, ends: tuple[int, ...]) -> Grammars:
    """The Grammars of a model, built once for successive calls."""
    return Grammars(tokenizer, vocab, ends)


class _Guide:
    """A grammar, and an answer's state in it. See Guide."""

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher, self._field = matcher, field

    def mask(self, scores: Any) -> None:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(self._field, _error_line(self._matcher.get_error()))
        refused = ~np.frombuffer(mask, np.uint8)
        bits = np.unpackbits(refused, count=len(scores), bitorder="little")
        scores[bits.view(bool)] = -np.inf

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)


class _Spelled:
    """A vocabulary as llguidance takes it: bytes of each token, those of special ones marked."""

    def __init__(self, tokenizer: Tokenizer, size: int, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end, None
        special = tokenizer.special_ids
        self.special_token_ids = sorted(special)
        self.tokens = [
            b"\xff" + (tokenizer.token_of(id) or "").encode()
            if id in special
            else tokenizer.token_bytes(id)
            for id in range(size)
        ]
        self._ids = {data: id for id, data in enumerate(self.tokens) if id not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text that a grammar leaves no choice about."""
        data = text if isinstance(text, bytes) else text.encode()
        try:
            ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            ids = []
        if b"".join(self.tokens[id] for id in ids) == data:
            return ids
        return list(self._greedy(data))  # a vocabulary that adds a space before each text

    def _greedy(self, data: bytes) -> Iterator[int]:
        """The longest token at each position."""
        at = 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                if (id := self._ids.get(data[at : at + size])) is not None:
                    yield id
                    at += size
                    break
            else:
                return


def _error(grammar: Grammar) -> str | None:
    """The error of a grammar that is too large or costly; None: it is not."""
    if len(grammar.lark) > MAX_CHARS:
        return f"{len(grammar.lark):,} characters, expected at most {MAX_CHARS:,}"
    patterns, states = list(grammar.patterns), 1
    for key, value in (pair for schema in grammar.schemas for pair in keywords(schema)):
        if key == "multipleOf" and isinstance(value, (int, float)) and 0 < value < math.inf:
            states = math.lcm(states, _states(value))  # those of allOf multiply
            if states > MAX_MULTIPLE:
                return f"multipleOf: got {value}, at most {MAX_MULTIPLE} in all is taken"
        if key == "pattern" and isinstance(value, str):
            patterns.append(value)
        if key == "patternProperties" and isinstance(value, dict):
            patterns += value
    for pattern in patterns:
        if (most := repeats(pattern)) > MOST_REPEATS:
            return f"{pattern[:40]!r} repeats {most:,} times, expected at most {MOST_REPEATS:,}"
    return None


def _states(multiple: float) -> int:
    """States of the automaton of multipleOf: the number without its decimal point."""
    number = Decimal(str(multiple)).normalize()
    return int(number.scaleb(-min(0, int(number.as_tuple().exponent))))


def repeats(pattern: str) -> int:
    """The largest product of the counts of repeats that are nested in one another."""
    open: list[int] = []  # the largest product inside each open group, so far
    most, before = 1, 1  # so far in this group; of the last part
    for found in _PART.finditer(pattern):
        part = found[0]
        if part == "(":
            open.append(most)
            most = before = 1
        elif part == ")" and open:
            before, most = most, max(open.pop(), most)
        elif found[1] is not None:
            before *= int((found[3] or found[1])[:9])
            most = max(most, before)
        elif part not in "*+?":
            before = 1
    return most


def keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """All keys of a schema and of its subschemas, with their values."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield from one.items()
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _error_line(error: str) -> str:
    """llguidance's message in a line."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:_MOST_SAID]
