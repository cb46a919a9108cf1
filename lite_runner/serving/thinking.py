"""Thinking before an answer: switched on and off, separated, bounded, and outside of grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ConfigError
from lite_runner.generation import Guide
from lite_runner.serving.errors import ApiError
from lite_runner.serving.schemas import ChatRequest
from lite_runner.structured.grammars import Grammar
from lite_runner.text.thinking import (
    HARMONY,
    HarmonyReader,
    Stage,
    ThinkingMarks,
    ThinkingReader,
    overlap,
    stage_of,
    thinking_marks,
    thinking_switch,
)
from lite_runner.text.tokenizer import Tokenizer

_TAIL = 64  # tokens of a prompt in which its template may have begun the thinking


def template_kwargs(body: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The variables of the chat template that a request asks for. Raises ApiError for what the
    template cannot do."""
    given = checked_kwargs(body.chat_template_kwargs, tokenizer)
    if body.enable_thinking is not None:
        given = _switch(tokenizer, body.enable_thinking, "enable_thinking") | given
    effort = body.reasoning_effort
    if effort is not None and not given.keys() & {
        "reasoning_effort",
        "enable_thinking",
        "thinking",
    }:
        if tokenizer.template_reads("reasoning_effort"):
            given["reasoning_effort"] = effort
        elif effort != "medium" or tokenizer.template_kwargs:
            given |= _switch(tokenizer, effort != "none", "reasoning_effort")
    return given


def checked_kwargs(given: Mapping[str, Any] | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """`chat_template_kwargs` of a request. Raises ApiError for one that the template does not
    read."""
    try:
        tokenizer.check_template_kwargs(given or {})
    except ConfigError as error:
        raise ApiError(
            400, error.message, "chat_template_kwargs", "unsupported_parameter"
        ) from None
    return dict(given or {})


def _switch(tokenizer: Tokenizer, on: bool, field: str) -> dict[str, Any]:
    try:
        return dict(thinking_switch(tokenizer.chat_template, on))
    except ConfigError as error:
        why = f"{field}: {error.message}"
        raise ApiError(400, why, field, "unsupported_parameter") from None


class Thinking:
    """The thinking of the answers to one request."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer) -> None:
        """Raises ApiError for an unsupported request."""
        self._tokenizer, self._budget = tokenizer, body.thinking_token_budget
        self.is_returned = body.include_reasoning is not False
        self._marks = thinking_marks(tokenizer.chat_template)
        if self._marks is None and self._budget is not None:
            raise ApiError(
                400, "thinking_token_budget: the model does not think", "thinking_token_budget"
            )
        texts = (self._marks.begin, self._marks.end) if self._marks else (None, None)
        self._begin, self._end = map(tokenizer.id_of, texts)
        ids = self._begin, self._end
        self.keeps_special = not tokenizer.special_ids.isdisjoint(ids)
        # Recognized in the text then, and a part of its grammar.
        self._is_spelled = None in ids and not self.keeps_special and self._marks is not None
        self._stage: Stage = "over"

    def follow(self, prompt: Sequence[int]) -> None:
        """Note the stage of thinking in which the prompt ends."""
        if self._marks is not None:
            tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
            self._stage = stage_of(tail, self._marks)

    def reader(self) -> ThinkingReader | HarmonyReader | None:
        """Reads one answer; None: the model does not think."""
        if self._marks is HARMONY:
            return HarmonyReader()
        return None if self._marks is None else ThinkingReader(self._marks, self._stage)

    def around(self, grammar: Grammar | None) -> Grammar | None:
        """The grammar of an answer; with its thinking, where the marks are several tokens each."""
        if grammar is None or self._marks is None or not self._is_spelled or self._stage == "over":
            return grammar
        thinking = f'{json.dumps(self._marks.begin)} thinking "\\n"? "\\n"?'
        begins = f"({thinking})?" if self._stage == "open" else thinking.partition(" ")[2]
        end = re.escape(self._marks.end).replace("/", r"\/")
        rules = f"start: {begins} answer\nthinking[lazy]: /(?s:.*){end}/\n"
        return replace(grammar, lark=rules + grammar.lark.replace("start: ", "answer: ", 1))

    def guide(self, rest: Callable[[], Guide] | None, *, calls: bool) -> Callable[[], Guide] | None:
        """Guides of answers whose text behind the thinking is restricted by `rest`, to `calls` or
        to an answer. Raises ApiError for marks that are partly special tokens."""
        stage, marks, budget = self._stage, self._marks, self._budget
        if stage == "over" or (rest is None and budget is None):
            return rest
        if self._is_spelled and marks is not None:
            if budget is None:
                return rest
            return lambda: SpelledGuide(rest and rest(), stage, marks, budget, self._tokenizer)
        if self._marks is HARMONY and self._end is not None:
            return self._of_harmony(rest, self._end, calls=calls)
        if self._end is None or (stage == "open" and self._begin is None):
            field = "thinking_token_budget" if budget is not None else "chat_template_kwargs"
            why = "one mark of the model's thinking is a special token, and one is not"
            raise ApiError(400, f"{field}: not supported: {why}", field, "unsupported_parameter")
        begin, end = self._begin, self._end
        return lambda: ThinkingGuide(rest and rest(), stage, begin, end, budget)

    def _of_harmony(
        self, rest: Callable[[], Guide] | None, end: int, *, calls: bool
    ) -> Callable[[], Guide]:
        """The answer is a message of its own, behind that of the thinking."""
        after = "" if rest is None else "<|start|>assistant"
        if rest is not None and not calls:
            after += "<|channel|>final<|message|>"
        begin, behind = self._spelled(HARMONY.begin), self._spelled(after)
        others = sorted(self._tokenizer.special_ids - {end})
        budget = self._budget
        return lambda: HarmonyGuide(rest and rest(), begin, end, behind, others, budget)

    def _spelled(self, text: str) -> list[int]:
        """The tokens of a text with marks in it."""
        found: list[int] = []
        for part in filter(None, re.split(r"(<\|\w+\|>)", text)):
            id = self._tokenizer.id_of(part)
            found += self._tokenizer.encode(part, False) if id is None else [id]
        return found


def _allow_only(scores: NDArray[np.floating[Any]], token: int) -> None:
    score = scores[token]
    scores[:] = -np.inf
    scores[token] = score


class SpelledGuide:
    """Restricts thinking to its budget where the marks are several tokens each. See Guide."""

    def __init__(
        self,
        rest: Guide | None,
        stage: Stage,
        marks: ThinkingMarks,
        budget: int,
        tokenizer: Tokenizer,
    ) -> None:
        """`rest`: of the whole answer."""
        self._rest, self._stage, self._left = rest, stage, budget
        self._begin, self._end, self._tokenizer = marks.begin, marks.end, tokenizer
        self._text = ""  # the newest, enough to recognize a mark
        self._forced: list[int] = []
        self._bound()

    def mask(self, scores: NDArray[np.floating[Any]]) -> None:
        if self._forced:
            _allow_only(scores, self._forced[0])
        elif self._rest is not None:
            self._rest.mask(scores)

    def take(self, token: int) -> None:
        if self._rest is not None:
            self._rest.take(token)
        if self._forced:
            self._forced.pop(0)
            return
        if self._stage == "over":
            return
        self._left -= self._stage == "inside"
        self._text += self._tokenizer.decode([token], skip_special_tokens=False)
        if self._stage == "open":
            self._text = self._text.lstrip()
            if self._text.startswith(self._begin):
                self._stage, self._text = "inside", self._text.removeprefix(self._begin)
            elif not self._begin.startswith(self._text):
                self._stage = "over"
        self._bound()

    def _bound(self) -> None:
        if self._stage != "inside":
            return
        if self._end in self._text:
            self._stage = "over"
        elif self._left <= 0:
            rest = self._end[overlap(self._text, self._end) :]  # the model may have begun it
            self._stage, self._forced = "over", self._tokenizer.encode(rest, False)
        self._text = self._text[1 - len(self._end) :]


class HarmonyGuide:
    """Restricts the message behind the thinking, which stands in one of its own. See Guide."""

    def __init__(
        self,
        rest: Guide | None,
        begin: Sequence[int],
        end: int,
        after: Sequence[int],
        others: Sequence[int],
        budget: int | None,
    ) -> None:
        """`begin`, `after`: the tokens that begin the thinking, and the message behind it;
        `others`: special tokens that the thinking has none of."""
        self._rest, self._end, self._after = rest, end, list(after)
        self._forced, self._thinks = list(begin), True
        self._others = np.array(others, np.int64)
        self._left = budget  # tokens of thinking; None: as many as it takes

    def mask(self, scores: NDArray[np.floating[Any]]) -> None:
        if self._forced or (self._thinks and self._left == 0):
            _allow_only(scores, self._forced[0] if self._forced else self._end)
        elif self._thinks:
            scores[self._others[self._others < len(scores)]] = -np.inf
        elif self._rest is not None:
            self._rest.mask(scores)

    def take(self, token: int) -> None:
        if self._forced:
            self._forced.pop(0)
        elif self._thinks:
            if token == self._end:
                self._thinks, self._forced = False, self._after
            elif self._left:
                self._left -= 1
        elif self._rest is not None:
            self._rest.take(token)


class ThinkingGuide:
    """Restricts a sequence behind its thinking alone, and the thinking to its budget. See Guide."""

    def __init__(
        self, rest: Guide | None, stage: Stage, begin: int | None, end: int, budget: int | None
    ) -> None:
        self._rest, self._stage, self._begin, self._end = rest, stage, begin, end
        self._left = budget  # tokens of thinking; None: as many as it takes

    def mask(self, scores: NDArray[np.floating[Any]]) -> None:
        if self._stage == "inside":
            if self._left == 0:
                _allow_only(scores, self._end)
        elif self._rest is not None:
            may_begin = self._stage == "open"
            score = scores[self._begin] if may_begin else None
            self._rest.mask(scores)
            if may_begin:
                scores[self._begin] = score

    def take(self, token: int) -> None:
        if self._stage == "inside":
            if token == self._end:
                self._stage = "over"
            elif self._left:
                self._left -= 1
        elif self._stage == "open" and token == self._begin:
            self._stage = "inside"
        else:
            self._stage = "over"
            if self._rest is not None:
                self._rest.take(token)
