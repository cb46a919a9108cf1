"""Thinking: switched by a request, told apart from the answer, bounded, and outside of grammars."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.text.tokenizer import Tokenizer
from tests.generation.mock import MockBackend
from tests.serving.conftest import END, Served, Start, tokenizer_with_chat
from tests.serving.test_app import call
from tests.serving.test_schema import sent

MESSAGES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
)
# As Qwen3's: the model begins by itself, or an empty thinking is written for it.
SWITCHED = (
    MESSAGES + "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As DeepSeek-R1's: always.
BEGUN = MESSAGES + "{# </think> #}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
EFFORT = MESSAGES + "{{ reasoning_effort }}{# <think></think> #}[assistant]"
PLAIN = MESSAGES + "[assistant]"
CHAT = "/v1/chat/completions"
MARKS = ("<think>", "</think>")
THOUGHT = "<think>\nWhy?\n</think>\n\nYes."
ASKED: dict[str, Any] = {
    "model": "base",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
}


def says(text: str, tokenizer: Tokenizer) -> MockBackend:
    """A model that always answers the same behind the prompt, but for what may not come next."""
    script = [*tokenizer.encode(text, add_special_tokens=False), END]
    starts: list[list[int]] = []  # of the prompts

    def logits(history: list[int], _: int) -> NDArray[np.float32]:
        prompt = next((len(one) for one in starts if history[: len(one)] == one), None)
        if prompt is None:
            starts.append(list(history))
            prompt = len(history)
        scores = np.zeros(tokenizer.vocab_size, np.float32)
        scores[script[min(len(history) - prompt, len(script) - 1)]] = 50
        return scores

    return MockBackend(logits, 4, 4096, 4)


def start_with(start: Start, template: str, text: str, *, tokens: bool = True) -> Served:
    tokenizer = tokenizer_with_chat(template, MARKS if tokens else ())
    return start(says(text, tokenizer), tokenizer=tokenizer)


def asked(served: Served, **more: Any) -> dict[str, Any]:
    """The message, and reasoning_tokens as `counted`, the same streamed."""
    whole = json.loads(sent(served, CHAT, {**ASKED, **more}))
    message, usage = whole["choices"][0]["message"], whole["usage"]
    message["counted"] = usage.get("completion_tokens_details", {}).get("reasoning_tokens")
    streamed: dict[str, str] = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    content = sent(served, CHAT, {**ASKED, **more, **options}).decode()
    chunks = [json.loads(line.removeprefix("data: ")) for line in content.split("\n\n")[:-2]]
    cached = chunks[-1]["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert {**chunks[-1]["usage"], "prompt_tokens_details": {"cached_tokens": 0}} == {
        **usage,
        "prompt_tokens_details": {"cached_tokens": 0},
    } and cached
    for chunk in chunks[:-1]:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            streamed[name] = streamed.get(name, "") + delta.get(name, "")
    for name, text in streamed.items():
        assert text == (message.get(name) or "")
    return message


@pytest.mark.parametrize("tokens", [True, False])
def test_thinking_is_separated_from_the_answer(start: Start, tokens: bool) -> None:
    served = start_with(start, SWITCHED, THOUGHT, tokens=tokens)
    message = asked(served)
    assert message["content"] == "Yes."
    assert message["reasoning"] == message["reasoning_content"] == "Why?"
    assert message["counted"] == (8 if tokens else 15)  # from where it is known to have begun
    hidden = asked(served, include_reasoning=False)
    assert hidden["content"] == "Yes." and "reasoning" not in hidden
    assert hidden["counted"] == message["counted"]


def test_one_that_is_cut_is_no_answer(start: Start) -> None:
    message = asked(start_with(start, SWITCHED, THOUGHT), max_tokens=4)
    assert message["content"] is None and message["reasoning"] == "Wh" and message["counted"] == 4


def test_a_template_may_begin_it(start: Start) -> None:
    message = asked(start_with(start, BEGUN, "Why?</think>Yes."))
    assert (message["reasoning"], message["content"], message["counted"]) == ("Why?", "Yes.", 5)


def test_a_model_that_does_not_think(start: Start) -> None:
    served = start_with(start, PLAIN, THOUGHT, tokens=False)
    message = asked(served, enable_thinking=False, reasoning_effort="none")
    assert message["content"] == THOUGHT and message["counted"] is None
    for field in ({"enable_thinking": True}, {"reasoning_effort": "high"}):
        assert refused(served, **field) == f"{next(iter(field))}: the model does not think"
    assert "does not think" in refused(served, thinking_token_budget=3)


def refused(served: Served, **more: Any) -> str:
    status, _, content = call(served, CHAT, {**ASKED, **more})
    assert status == 400
    message: str = json.loads(content)["error"]["message"]
    return message


def rendered(served: Served, **body: Any) -> str:
    """The tokens of /tokenize for messages."""
    found = json.loads(sent(served, "/tokenize", {"messages": ASKED["messages"], **body}))
    return served.tokenizer.decode(found["tokens"], skip_special_tokens=False)


@pytest.mark.parametrize(
    "off",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ],
)
def test_a_request_switches_it_off(start: Start, off: dict[str, Any]) -> None:
    message = asked(start_with(start, SWITCHED, "<think> Yes."), **off)
    assert (message["content"], message["counted"]) == ("<think> Yes.", 0)


def test_tokenize_counts_what_a_chat_does(start: Start) -> None:
    served = start_with(start, SWITCHED, "Yes.")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert rendered(served).endswith("[assistant]")
    assert rendered(served, **off).endswith("[assistant]<think>\n\n</think>\n\n")
    assert "low[assistant]" in rendered(
        start_with(start, EFFORT, ""), chat_template_kwargs={"reasoning_effort": "low"}
    )
    message = json.loads(call(served, "/tokenize", {"prompt": "a", **off})[2])["error"]["message"]
    assert message == "chat_template_kwargs: only with messages"


def test_an_effort_is_the_templates(start: Start) -> None:
    served = start_with(start, EFFORT, THOUGHT)
    assert asked(served, reasoning_effort="low")["reasoning"] == "Why?"
    refused(served, chat_template_kwargs={"effort": "low"})


def test_a_switch_that_a_template_lacks_is_refused(start: Start) -> None:
    served = start_with(start, BEGUN, THOUGHT)
    asked(served, enable_thinking=True)
    why = "the model thinks, and its chat template has no switch for that"
    assert refused(served, enable_thinking=False) == f"enable_thinking: {why}"
    error = refused(served, chat_template_kwargs={"enable_thinking": False})
    why = "the model's chat template does not read 'enable_thinking'"
    assert error == f"chat_template_kwargs: {why}"
    assert "messages is not a setting" in refused(served, chat_template_kwargs={"messages": []})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_earlier_turns_goes_to_the_template(start: Start, name: str) -> None:
    served = start_with(start, SWITCHED, THOUGHT)
    earlier = {"role": "assistant", "content": "Yes.", name: "Why?"}
    body = {"messages": [ASKED["messages"][0], earlier, {"role": "user", "content": "Sure?"}]}
    asked(served, **body)
    assert "[assistant]Why?Yes.[user]Sure?" in rendered(served, **body)


@pytest.mark.parametrize(("template", "text"), [(SWITCHED, THOUGHT), (BEGUN, THOUGHT[7:])])
@pytest.mark.parametrize("budget", [0, 2])
def test_a_budget_ends_it(start: Start, template: str, text: str, budget: int) -> None:
    message = asked(start_with(start, template, text), thinking_token_budget=budget, max_tokens=40)
    assert message["counted"] == budget + 1 + (template is SWITCHED)
    assert (message["reasoning"] if budget else "") == "\nWhy?"[:budget].lstrip()


@pytest.mark.parametrize(
    ("template", "text", "thought"),
    [
        (SWITCHED, "<think>No JSON.</think>no JSON", "No JSON."),
        (SWITCHED, "no JSON", None),
        (BEGUN, "No JSON.</think>no JSON", "No JSON."),
    ],
)
def test_a_grammar_begins_behind_it(
    start: Start, template: str, text: str, thought: str | None
) -> None:
    served = start_with(start, template, text)
    message = asked(served, guided_choice=["yes", "no, never"])
    assert message["content"] in ("yes", "no, never")
    assert message.get("reasoning") == thought
    off = {"enable_thinking": False} if template is SWITCHED else {}
    assert asked(served, guided_choice=["yes"], **off)["content"] == "yes"


@pytest.mark.parametrize(
    ("template", "text", "thought"),
    [
        (SWITCHED, "<think>No <b> JSON.</think>\n\nno JSON", "No <b> JSON."),
        (SWITCHED, "no JSON", None),
        (BEGUN, "No </th JSON.</think>no JSON", "No </th JSON."),
        (BEGUN, "</think>no JSON", None),
    ],
)
def test_marks_of_several_tokens(
    start: Start, template: str, text: str, thought: str | None
) -> None:
    """A grammar behind the thinking, a budget, and both."""
    served = start_with(start, template, text, tokens=False)
    wanted = {"guided_choice": ["yes", "no, never"]}
    message = asked(served, **wanted)
    assert message["content"] in ("yes", "no, never")
    assert message.get("reasoning") == thought
    for more in ({}, wanted):
        message = asked(served, thinking_token_budget=2, max_tokens=80, **more)
        assert message.get("reasoning") == (thought and "No")
        assert more == {} or message["content"] in ("yes", "no, never")


def test_calls_come_behind_it(start: Start) -> None:
    """Read where the model makes one, and forced there where it makes none."""
    template = "{% if tools %}{{ tools[0].function.name }}{# <tool_call> #}{% endif %}" + SWITCHED
    tools = [{"type": "function", "function": {"name": "clock"}}]
    calls = (
        '<think>Hm. <tool_call></think>\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    )
    for text, choice in ((calls, "auto"), ("<think>Hm. <tool_call></think>no", "required")):
        message = asked(start_with(start, template, text), tools=tools, tool_choice=choice)
        assert (message["reasoning"], message["content"]) == ("Hm. <tool_call>", None)
        assert [one["function"]["name"] for one in message["tool_calls"]] == ["clock"]


# As gpt-oss' published template has it, in short.
HARMONY = (
    "{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium')"
    " + '\\n# Valid channels: analysis, commentary, final.<|end|>' }}"
    "{%- if tools %}<|start|>developer<|message|># Tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{%- if message.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{%- endif %}"
    "{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    "{{- '<|start|>assistant to=functions.' + call.name }}"
    "{{- '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson + '<|call|>' }}"
    "{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{%- endif %}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|start|>functions.look to=assistant<|channel|>commentary<|message|>' }}"
    "{{- message.content + '<|end|>' }}"
    "{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TOKENS = [
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")
]
ANALYSIS = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
LOOKS = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "sea"}<|call|>'
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sea", "sky"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


def gpt_oss(start: Start, text: str) -> Served:
    tokenizer = tokenizer_with_chat(HARMONY, TOKENS)
    return start(says(text, tokenizer), tokenizer=tokenizer)


def test_channels_of_gpt_oss(start: Start) -> None:
    message = asked(gpt_oss(start, f"{ANALYSIS}{FINAL}Yes."))
    assert (message["reasoning"], message["content"]) == ("Why?", "Yes.")
    assert message["counted"] == 6  # with the marks around it


def test_a_call_behind_the_analysis(start: Start) -> None:
    served = gpt_oss(start, f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|>{LOOKS}")
    message = asked(served, tools=[LOOK])
    assert (message["reasoning"], message["content"]) == ("Why?", "I look.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": "sea"}'}
    with served.client.responses.stream(model="base", input="hi", temperature=0) as stream:
        kinds = [item.type for item in stream.get_final_response().output]
    assert kinds[:2] == ["reasoning", "message"]


@pytest.mark.parametrize("text", ["Oslo is", f"{ANALYSIS}{FINAL}It may be Rome.", ANALYSIS * 3])
def test_gpt_oss_thinks_before_what_is_restricted(start: Start, text: str) -> None:
    served = gpt_oss(start, text)
    message = asked(served, guided_choice=["Oslo", "Rome"], thinking_token_budget=20)
    assert message["content"] in ("Oslo", "Rome") and message["reasoning"]
    message = asked(served, tools=[LOOK], tool_choice="required", thinking_token_budget=3)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"])["at"] in ("sea", "sky")
    assert call["function"]["name"] == "look" and len(message["reasoning"]) == 3
    message = asked(served, tools=[LOOK], guided_choice=["Oslo", "Rome"], thinking_token_budget=3)
    assert message["content"] in ("Oslo", "Rome") or message["tool_calls"]


def test_turns_of_gpt_oss(start: Start) -> None:
    served = gpt_oss(start, f"{FINAL}Yes.")
    tool_call = {"id": "c", "type": "function"} | {
        "function": {"name": "look", "arguments": '{"at": "sky"}'}
    }
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning": "Hm.", "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": "c", "content": "blue"},
    ]
    body = {"model": "base", "messages": messages}
    status, _, content = call(served, "/tokenize", body)
    assert status == 200
    text = served.tokenizer.decode(json.loads(content)["tokens"], skip_special_tokens=False)
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        ' to=functions.look<|channel|>commentary json<|message|>{"at": "sky"}<|call|>'
        "<|start|>functions.look to=assistant<|channel|>commentary<|message|>blue<|end|>"
        "<|start|>assistant"
    )
