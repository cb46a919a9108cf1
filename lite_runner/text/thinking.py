"""Thinking: the text before a model's answer, between marks."""

from __future__ import annotations

import re
from typing import Literal

from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.text.tokenizer import reads

_SPACE = " \t\r\n"
Stage = Literal["open", "inside", "over"]  # may begin; has begun; has ended, or is absent


@dataclass(frozen=True)
class ThinkingMarks:
    """The marks around thinking."""

    begin: str
    end: str
    label: str = ""  # a label before the thinking, not part of it


# gpt-oss, whose answers are messages in channels: see HarmonyReader.
HARMONY = ThinkingMarks("<|channel|>analysis<|message|>", "<|end|>")
# Qwen3, DeepSeek-R1, SmolLM3, GLM-4.5 and most others; Magistral; Seed-OSS; Command A; Gemma 4.
_KNOWN = (
    ThinkingMarks("<think>", "</think>"),
    ThinkingMarks("[THINK]", "[/THINK]"),
    ThinkingMarks("<seed:think>", "</seed:think>"),
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingMarks("<|channel>", "<channel|>", "thought\n"),
)


def thinking_marks(template: str | None) -> ThinkingMarks | None:
    """The marks in a chat template; None: the model does not think."""
    if HARMONY.begin in (template or ""):
        return HARMONY
    return next((marks for marks in _KNOWN if marks.end in (template or "")), None)


def thinking_switch(template: str | None, on: bool) -> dict[str, bool | int]:
    """The variables of a chat template that switch thinking on or off. Raises ConfigError where it
    has none, and does otherwise."""
    for name in ("enable_thinking", "thinking"):
        if reads(template, name):
            return {name: on}
    if reads(template, "thinking_budget"):
        return {} if on else {"thinking_budget": 0}
    if on is (thinking_marks(template) is not None):
        return {}
    does = "does not think" if on else "thinks, and its chat template has no switch for that"
    raise ConfigError(f"the model {does}")


def stage_of(prompt: str, marks: ThinkingMarks) -> Stage:
    """The stage in which an answer begins, by the end of its prompt: some templates begin the
    thinking themselves, or write an empty one to skip it."""
    text = prompt.rstrip(_SPACE)
    if text.endswith(marks.end):
        return "over"
    return "inside" if text.endswith(marks.begin) else "open"


class ThinkingReader:
    """Separates the thinking from the text of an answer, as it comes."""

    def __init__(self, marks: ThinkingMarks, stage: Stage) -> None:
        self._marks, self.stage = marks, stage
        self._label = marks.label
        self._text = ""  # not yet certain
        self._begun = stage == "over"  # the content has begun: white space is kept from here on

    def put(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """The thinking, and the text behind it, that are certain now, without the marks and the
        white space around both; `last`: no more follows."""
        self._text += text
        if self.stage == "open" and not self._has_begun(last):
            return "", ""
        if self.stage == "inside" and not self._is_labelled(last):
            return "", ""
        thinking = self._thinking(last) if self.stage == "inside" else ""
        if self.stage == "inside":
            return thinking, ""
        return thinking, self._taken(self._text)

    def _has_begun(self, last: bool) -> bool:
        """True if it is certain that an answer begins with thinking, or with none."""
        begin, text = self._marks.begin, self._text.lstrip(_SPACE)
        if text.startswith(begin):
            self.stage, self._text = "inside", text.removeprefix(begin)
        elif last or not begin.startswith(text):
            self.stage, self._begun = "over", True
        return self.stage != "open"

    def _is_labelled(self, last: bool) -> bool:
        """True if it is certain whether the thinking has a label, which is taken off."""
        if not last and self._label.startswith(self._text) and self._text != self._label:
            return False
        self._text = self._text.removeprefix(self._label)
        self._label = ""
        return True

    def _thinking(self, last: bool) -> str:
        before, mark, after = self._text.partition(self._marks.end)
        if mark:
            thinking = self._taken(before).rstrip(_SPACE)
            self.stage, self._text, self._begun = "over", after, False
            return thinking
        held = 0 if last else overlap(before, self._marks.end)
        certain = before[: len(before) - held].rstrip(_SPACE)
        thinking = self._taken(certain)
        self._text = before[len(certain) :]
        return thinking

    def _taken(self, text: str) -> str:
        """Take a certain text off the buffer."""
        self._text = ""
        text = text if self._begun else text.lstrip(_SPACE)
        self._begun = self._begun or bool(text)
        return text


_HEADS = ("<|channel|>", "<|start|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", *_HEADS)
_CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"to=([\w.-]+)")


class HarmonyReader:
    """Separates the channels of an answer of gpt-oss, as it comes: analysis is thinking; final, and
    what commentary says to the user, are text; a call to a function stays a message of commentary,
    whose header is always written alike."""

    def __init__(self) -> None:
        self._text = ""  # not yet certain
        # The message that is being read; None: its header.
        self._kind: Literal["thinking", "text", "call"] | None = None
        self._any = False  # a message has begun

    @property
    def stage(self) -> Stage:
        if self._kind == "thinking":
            return "inside"
        return "over" if self._any else "open"

    def put(self, text: str, *, last: bool = False) -> tuple[str, str]:
        self._text += text
        thinking = answer = ""
        while self._text:
            if self._kind is None:
                header = self._header(last)
                if self._kind is None:
                    break
                answer += header
            part, has_ended = self._body(last)
            if self._kind == "thinking":
                thinking += part
            else:
                answer += part
            if not has_ended:
                break
            answer += "<|call|>" if self._kind == "call" else ""
            self._kind = None
        return thinking, answer

    def _header(self, last: bool) -> str:
        """Take a header off, once it is whole; that of a call is returned, always written alike."""
        text = self._text.lstrip(_SPACE)
        if not text.startswith((*_HEADS, "to=")):
            if last or not any(one.startswith(text) for one in (*_HEADS, "to=")):
                self._kind, self._any = "text", True  # without a header
            return ""
        header, mark, rest = text.partition("<|message|>")
        if not mark:
            self._text = "" if last else self._text
            return ""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        to = recipient[1] if recipient else ""
        self._text, self._any = rest, True
        if to.startswith("functions."):
            self._kind = "call"
            return f"<|channel|>commentary to={to} <|constrain|>json<|message|>"
        # Messages to built-in tools, such as python, are not for the user.
        silent = to or (channel is not None and channel[1] == "analysis")
        self._kind = "thinking" if silent else "text"
        return ""

    def _body(self, last: bool) -> tuple[str, bool]:
        """The certain parts of a message, and True if it has ended."""
        places = {self._text.find(end): end for end in _ENDS if end in self._text}
        if places:
            place, end = min(places.items())
            part, rest = self._text[:place], self._text[place:]
            self._text = rest if end in _HEADS else rest.removeprefix(end)
            return part, True
        held = 0 if last else max(overlap(self._text, end) for end in _ENDS)
        size = len(self._text) - held
        part, self._text = self._text[:size], self._text[size:]
        return part, False


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `mark`."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
