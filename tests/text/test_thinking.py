from __future__ import annotations

import itertools

import pytest

from lite_runner.errors import ConfigError
from lite_runner.text.thinking import (
    HARMONY,
    HarmonyReader,
    Stage,
    ThinkingMarks,
    ThinkingReader,
    stage_of,
    thinking_marks,
    thinking_switch,
)
from lite_runner.text.tokenizer import reads
from tests.each import each

MARKS = ThinkingMarks("<think>", "</think>")


@each(
    ("template", "begin"),
    [
        ("{% if '</think>' in content %}", "<think>"),
        ("[THINK]{{ x }}[/THINK]", "[THINK]"),
        ("<seed:think></seed:think>", "<seed:think>"),
        ("<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>"),
        ("{{- '<|channel>thought\\n' + t + '<channel|>' }}", "<|channel>"),
        ("{{- '<|start|>assistant<|channel|>analysis<|message|>' + t }}<|end|>", HARMONY.begin),
        ("<|user|>{{ x }}<|end|>", None),
        ("I think", None),
        (None, None),
    ],
)
def test_the_marks_are_those_of_the_template(template: str | None, begin: str | None) -> None:
    found = thinking_marks(template)
    assert (found and found.begin) == begin


@pytest.mark.parametrize(
    ("prompt", "stage"),
    [
        ("<|im_start|>assistant\n", "open"),
        ("<think>a</think>b<|im_start|>assistant\n", "open"),
        ("<|im_start|>assistant\n<think>\n", "inside"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "over"),
    ],
)
def test_a_prompt_may_begin_the_thinking_or_end_it(prompt: str, stage: Stage) -> None:
    assert stage_of(prompt, MARKS) == stage


@each(
    ("stage", "text", "thinking", "rest"),
    [
        ("open", "<think>\nI  see.\n\n</think>\n\nYes.\n", "I  see.", "Yes.\n"),
        ("open", "\n<think>a<b</thin</think>c</think>", "a<b</thin", "c</think>"),
        ("open", " <thin> is none", "", " <thin> is none"),
        ("open", "<thi", "", "<thi"),
        ("open", "<think>cut </thi", "cut </thi", ""),
        ("open", "", "", ""),
        ("inside", "\nI see. \n</think>Yes", "I see.", "Yes"),
        ("inside", "cut\n", "cut", ""),
        ("inside", "</think>\n", "", ""),
        ("over", " <think>text</think>", "", " <think>text</think>"),
    ],
)
def test_it_is_the_same_however_the_text_comes(
    stage: Stage, text: str, thinking: str, rest: str
) -> None:
    cuts = itertools.combinations(range(1, len(text)), 2) if len(text) > 2 else [(0, 0)]
    for first, second in [(0, 0), *cuts]:
        reader = ThinkingReader(MARKS, stage)
        parts = [text[:first], text[first:second], text[second:]]
        read = [*map(reader.put, parts), reader.put("", last=True)]
        assert ["".join(one) for one in zip(*read, strict=True)] == [thinking, rest], parts


@each(
    ("text", "thinking", "rest"),
    [
        ("<|channel>thought\nI see.\n<channel|>Yes", "I see.", "Yes"),
        ("<|channel>thought\n<channel|>Yes", "", "Yes"),
        ("<|channel>thoughts<channel|>Yes", "thoughts", "Yes"),
        ("<|channel>thou", "thou", ""),
        ("<|channel>", "", ""),
        ("Yes", "", "Yes"),
    ],
)
def test_a_label_is_no_part_of_the_thinking(text: str, thinking: str, rest: str) -> None:
    marks = ThinkingMarks("<|channel>", "<channel|>", "thought\n")
    for cut in range(len(text) + 1):
        reader = ThinkingReader(marks, "open")
        read = [reader.put(text[:cut]), reader.put(text[cut:]), reader.put("", last=True)]
        assert ["".join(one) for one in zip(*read, strict=True)] == [thinking, rest], cut


@each(
    ("template", "on", "switch"),
    [
        ("{% if enable_thinking is false %}<think></think>{% endif %}", False, "enable_thinking"),
        ("{% if not thinking == true %}<think></think>{% endif %}", True, "thinking"),
        ("{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}", False, "budget"),
        ("{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}", True, None),
        # Names of a function's argument, and in a text, are no variables.
        ("{% set ns = namespace(enable_thinking=true) %}</think>", True, None),
        ("{{ raise('in the thinking field') }}{{ m.thinking }}</think>", True, None),
    ],
)
def test_the_switch_of_thinking(template: str, on: bool, switch: str | None) -> None:
    known = {"budget": {"thinking_budget": 0}, None: {}}
    assert thinking_switch(template, on) == known.get(switch, {switch: on})


@pytest.mark.parametrize(
    ("template", "read"),
    [
        ("{{ '" + "\\'" * 500_000 + "' ~ enable_thinking }}", True),
        ("{{ '" + "\\'" * 500_000 + " enable_thinking }}", False),
        ("{{ '" + "\\\\" * 250_000 + "\\ enable_thinking }}", False),
        ("{%" * 500_000 + "enable_thinking", False),
    ],
    ids=["a text", "a text without its end", "and its last quote", "blocks without their end"],
)
def test_the_switch_in_a_template_that_takes_quadratic_time_to_search(
    template: str, read: bool
) -> None:
    assert reads(template, "enable_thinking") is read


def test_thinking_without_a_switch() -> None:
    template = "{% set ns = namespace(enable_thinking=true) %}{{ ns.enable_thinking }}</think>"
    with pytest.raises(ConfigError, match="no switch"):
        thinking_switch(template, False)


def test_thinking_is_streamed() -> None:
    reader = ThinkingReader(MARKS, "open")
    read = [
        reader.put(piece) for piece in ("<think>", "\nI", " see", " </", "b", "</think>", "\nA")
    ]
    assert read == [("", ""), ("I", ""), (" see", ""), ("", ""), (" </b", ""), ("", ""), ("", "A")]


CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"


@each(
    ("text", "thinking", "rest"),
    [
        (
            "<|channel|>analysis<|message|>I see.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "I see.",
            "Yes.",
        ),
        ("<|channel|>final<|message|>No thought", "", "No thought"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>Looking.<|end|><|start|>assistant<|channel|>commentary to=functions.find "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            "a",
            "Looking." + CALL.format("find", '{"a": 1}'),
        ),
        (  # the recipient in the role
            "<|start|>assistant to=functions.go<|channel|>commentary json<|message|>{}<|call|>",
            "",
            CALL.format("go", "{}"),
        ),
        ("<|channel|>commentary to=python code<|message|>1+1<|call|>", "1+1", ""),
        ("<|channel|>analysis<|message|>cut <|en", "cut <|en", ""),
        ("<|channel|>analysis", "", ""),
        ("plain < text", "", "plain < text"),
        ("", "", ""),
    ],
)
def test_channels_however_the_text_comes(text: str, thinking: str, rest: str) -> None:
    for size in range(1, max(2, len(text))):
        reader = HarmonyReader()
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        read = [*map(reader.put, parts), reader.put("", last=True)]
        assert ["".join(one) for one in zip(*read, strict=True)] == [thinking, rest], parts


def test_channels_are_streamed() -> None:
    reader = HarmonyReader()
    parts = ("<|channel|>", "analysis", "<|message|>", "I", " see", "<|end|>", "<|start|>")
    parts += ("assistant", "<|channel|>", "final", "<|message|>", "A")
    pieces = [(reader.put(part), reader.stage) for part in parts]
    assert [one for one, _ in pieces if any(one)] == [("I", ""), (" see", ""), ("", "A")]
    assert [stage for _, stage in pieces][1:6] == ["open", "inside", "inside", "inside", "over"]
