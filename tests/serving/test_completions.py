"""/v1/completions, through the official client."""

from __future__ import annotations

import asyncio
import random
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Completion, Engine, Request
from lite_runner.generation.speculation import StepCost
from tests.generation.mock import MockBackend, served
from tests.serving.conftest import END, VOCAB, Served, Start, letters


def alone(prompt: Sequence[int], adapter: str | None = None, **options: object) -> Completion:
    """The completion of a prompt on a backend of its own."""
    config = GenerationConfig(**{"eos_token_id": (END,), "max_new_tokens": 16, **options})
    request = Request(np.array(list(prompt), np.int32), config, adapter, (config.seed, 0))
    return served(Engine(MockBackend(letters, 4, 256, 4)), [request])[0]


def text_of(completion: Completion) -> str:
    return bytes(completion.token_ids).decode()


def test_greedy_text_and_usage(start: Start) -> None:
    answer = start().client.completions.create(model="base", prompt="hello", temperature=0)
    expected = alone(b"hello")
    (choice,) = answer.choices
    assert choice.text == text_of(expected) and len(expected.token_ids) > 2
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage is not None and answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, len(expected.drawn))
    assert answer.usage.total_tokens == 5 + len(expected.drawn)


def test_a_stream_gives_the_whole_and_then_its_usage(start: Start) -> None:
    client = start().client
    asked = {"model": "base", "prompt": "hello", "seed": 5, "max_tokens": 30}
    whole = client.completions.create(**asked)
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_repeats_and_none_does_not(start: Start) -> None:
    client = start().client

    def text(**options: object) -> str:
        asked = {"model": "base", "prompt": "hello", "max_tokens": 40, "ignore_eos": True}
        seed = options.pop("seed", None)
        extra = {"ignore_eos": asked.pop("ignore_eos")}
        return client.completions.create(**asked, seed=seed, extra_body=extra).choices[0].text

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text() != text()


def test_sampling_of_a_request_overrides_the_run(start: Start) -> None:
    """With run_mode=serve do_sample=false (or temperature=0) requests are greedy that say
    nothing; a top_p that is off says nothing."""
    greedy = GenerationConfig(do_sample=False, eos_token_id=(END,))
    client = start(defaults=greedy).client
    expected = text_of(alone(b"hello", max_new_tokens=16))

    def text(**extra: object) -> str:
        asked = {"model": "base", "prompt": "hello", "seed": 3, "extra_body": extra}
        return client.completions.create(**asked).choices[0].text

    for extra in ({}, {"temperature": 0}, {"temperature": 0, "top_p": 0.9}, {"top_p": 1}):
        assert text(**extra) == expected, extra
    drawn = text_of(alone(b"hello", do_sample=True, seed=3, max_new_tokens=16))
    for extra in ({"temperature": 1}, {"top_k": 60}, {"temperature": 1, "top_p": 1, "top_k": -1}):
        assert text(**extra) == drawn != expected, extra


def test_several_prompts_and_samples_are_numbered_by_prompt(start: Start) -> None:
    answer = start().client.completions.create(
        model="base", prompt=["one", "two"], n=2, seed=3, max_tokens=8, logprobs=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 4
    expected = alone(b"one", do_sample=True, seed=3, max_new_tokens=8)
    assert texts[0] == text_of(expected)


def test_token_ids_are_a_prompt_and_lists_of_them_several(start: Start) -> None:
    client = start().client
    text = client.completions.create(model="base", prompt="hello", temperature=0).choices[0].text
    ids = client.completions.create(model="base", prompt=list(b"hello"), temperature=0)
    both = client.completions.create(
        model="base", prompt=[list(b"hello"), list(b"hi")], temperature=0
    )
    assert ids.choices[0].text == both.choices[0].text == text
    assert both.choices[1].text == text_of(alone(b"hi"))


def test_log_probabilities_of_prompt_and_text(start: Start) -> None:
    answer = start().client.completions.create(
        model="base", prompt="hello", temperature=0, max_tokens=4, logprobs=2, echo=True
    )
    expected = alone(b"hello", max_new_tokens=4, logprobs=2, prompt_logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and expected.logprobs and expected.prompt_logprobs
    assert answer.choices[0].text == "hello" + text_of(expected)
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.text_offset == list(range(len(found.tokens)))
    values = [None, *expected.prompt_logprobs.chosen, *expected.logprobs.chosen]
    assert found.token_logprobs == pytest.approx(values[: len(found.tokens)])
    assert found.top_logprobs[0] is None and all(
        len(top) == 2 and max(top.values()) >= value
        for top, value in zip(found.top_logprobs[1:], found.token_logprobs[1:], strict=True)
    )
    # Greedy tokens are the likeliest ones, as evaluation harnesses check.
    for top, value in list(zip(found.top_logprobs, found.token_logprobs, strict=True))[5:]:
        assert max(top.values()) == value


@pytest.mark.parametrize("tokens", [0, 6])
def test_echoed_log_probabilities_of_a_stream(start: Start, tokens: int) -> None:
    client = start().client
    asked = {
        "model": "base",
        "prompt": ["hello", "hi"],
        "n": 6,  # more than run at a time
        "seed": 4,
        "max_tokens": tokens,
        "logprobs": 2,
        "echo": True,
        "extra_body": {"prompt_logprobs": 1},
    }
    whole = client.completions.create(**asked)
    joined: dict[int, dict[str, list[object]]] = {}
    texts: dict[int, str] = {}
    scored = {}
    for chunk in client.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if found := getattr(choice, "prompt_logprobs", None):
            assert choice.index not in scored
            scored[choice.index] = found
        for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            joined.setdefault(choice.index, {}).setdefault(name, []).extend(values)
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert joined[choice.index] == choice.logprobs.model_dump()
        assert scored[choice.index] == choice.prompt_logprobs


def test_scoring_alone_generates_nothing(start: Start) -> None:
    answer = start().client.completions.create(
        model="base", prompt=list(b"hello"), max_tokens=0, logprobs=1, echo=True
    )
    assert answer.choices[0].text == "hello"
    assert len(answer.choices[0].logprobs.tokens) == 5 and answer.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(start: Start, stream: bool) -> None:
    whole = text_of(alone(b"hello", max_new_tokens=12))
    stop = whole[5:7]
    client = start().client
    asked = {"model": "base", "prompt": "hello", "temperature": 0, "max_tokens": 12}
    answer = client.completions.create(**asked, stop=[stop, "\n"], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_a_stop_string_among_drafted_tokens(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing behind it is sent or counted; /metrics has what was drafted."""

    def alphabet(history: list[int], _: int) -> NDArray[np.float32]:
        scores = np.zeros(VOCAB, np.float32)
        scores[97 + (history[-1] - 96) % 7] = 9
        return scores

    monkeypatch.setattr(StepCost, "most", lambda *_: 4)
    server = start(MockBackend(alphabet, 4, 256, 4), speculate=True)
    asked = {"model": "base", "prompt": "abcdefgabcdefg", "temperature": 0, "max_tokens": 40}
    whole = server.client.completions.create(**asked)
    assert whole.choices[0].text == ("abcdefg" * 6)[:40] and whole.usage.completion_tokens == 40
    assert len(server.backend.steps) < 20
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 20 and details.rejected_prediction_tokens >= 0
    for stop in ("d", "fga", "gab"):
        cut = server.client.completions.create(**asked, stop=[stop], logprobs=1)
        text = whole.choices[0].text
        assert cut.choices[0].text == text[: text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"
        assert cut.usage.completion_tokens == text.index(stop) + len(stop)
    metrics = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    count = r"^vllm:spec_decode_num_{}_total\S+ (\S+)$"
    drafts, drafted, accepted = (
        float(re.search(count.format(one), metrics, re.MULTILINE)[1])
        for one in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < accepted <= drafted <= 4 * drafts <= 4 * drafted


def test_tokens_may_end_it_too_or_nothing_does(start: Start) -> None:
    client = start().client
    whole = client.completions.create(
        model="base", prompt="x", temperature=0, max_tokens=200, extra_body={"ignore_eos": True}
    )
    assert whole.usage.completion_tokens == 200 and whole.choices[0].finish_reason == "length"
    stop = {"stop_token_ids": [ord(whole.choices[0].text[3])]}
    cut = client.completions.create(model="base", prompt="x", temperature=0, extra_body=stop)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == whole.choices[0].text[: len(cut.choices[0].text)]
    assert len(cut.choices[0].text) <= 3


def test_bias_and_penalties_change_the_tokens(start: Start) -> None:
    client = start().client
    asked = {"model": "base", "prompt": "x", "temperature": 0, "max_tokens": 10}
    forced = client.completions.create(**asked, logit_bias={str(ord("Z")): 100})
    assert forced.choices[0].text == "Z" * 10
    once = client.completions.create(
        **asked, logit_bias={str(ord("Y")): 60, str(ord("Z")): 59.5}, presence_penalty=1
    )
    assert once.choices[0].text == "YZ" + "Y" * 8
    each = client.completions.create(
        **asked, logit_bias={str(ord("Y")): 60, str(ord("Z")): 59.5}, frequency_penalty=1
    )
    assert each.choices[0].text == "YZ" * 5


def test_model_names_the_adapter(start: Start) -> None:
    client = start().client
    texts = {
        name: client.completions.create(model=name, prompt="hello", temperature=0).choices[0].text
        for name in ("base", "a", "b")
    }
    assert texts == {
        name: text_of(alone(b"hello", None if name == "base" else name)) for name in texts
    }
    assert len(set(texts.values())) == 3
    with pytest.raises(openai.NotFoundError, match="no model 'c'; available: base, a, b"):
        client.completions.create(model="c", prompt="hello")


def test_a_shared_prefix_is_not_computed_again(start: Start) -> None:
    client = start().client
    prompt = "the same long beginning of every one of them, "
    first = client.completions.create(model="base", prompt=prompt + "one", max_tokens=1)
    second = client.completions.create(model="base", prompt=prompt + "two", max_tokens=1)
    other = client.completions.create(model="a", prompt=prompt + "two", max_tokens=1)
    found = [one.usage.prompt_tokens_details.cached_tokens for one in (first, second, other)]
    assert found[0] == 0 and found[1] >= len(prompt) and found[2] == 0


REFUSED = [
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"n": 0}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 1000}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logit_bias": {"400": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": "x" * 300}, "prompt"),
]


@pytest.mark.parametrize(("changes", "param"), REFUSED, ids=str)
def test_unsupported_fields_are_refused_by_name(
    start: Start, changes: dict[str, object], param: str
) -> None:
    served = start()
    body = {"model": "base", "prompt": "hello", **changes}
    with pytest.raises(openai.BadRequestError) as raised:
        served.client.post("/completions", body=body, cast_to=object)
    error = raised.value.body
    assert isinstance(error, dict) and error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert next(iter(changes)) in error["message"] or param in error["message"]
    served.until_idle()


@pytest.mark.parametrize(
    ("lacks", "asked", "param"),
    [
        ({"can_copy": False}, {"n": 2, "temperature": 1}, "n"),
        ({"most_logits": 0}, {"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"most_logits": 0}, {"echo": True, "logprobs": 1}, "echo"),
    ],
    ids=str,
)
def test_errors_of_the_backend_name_the_field(
    start: Start, lacks: dict[str, Any], asked: dict[str, Any], param: str
) -> None:
    backend = MockBackend(letters, 4, 256, 4)
    backend.info = replace(backend.info, **lacks)
    body = {"prompt": "hello", **asked}
    with pytest.raises(openai.BadRequestError) as raised:
        start(backend).client.post("/completions", body=body, cast_to=object)
    assert raised.value.body["param"] == param


def test_every_answer_among_others_equals_the_one_alone(start: Start) -> None:
    served = start(max_queue=1000)
    generator = random.Random(1)
    cases = []
    for number in range(60):
        prompt = bytes(generator.choices(range(97, 123), k=generator.randint(1, 80)))
        options = {"max_tokens": generator.randint(1, 40), "seed": number}
        if generator.random() < 0.3:
            options["temperature"] = 0
        cases.append((prompt, generator.choice(["base", "a", "b"]), options))

    async def ask(served: Served) -> list[str]:
        client = served.async_client

        async def one(prompt: bytes, model: str, options: dict[str, int]) -> str:
            asked = {"model": model, "prompt": prompt.decode(), **options}
            if len(prompt) % 2:
                return (await client.completions.create(**asked)).choices[0].text
            chunks = await client.completions.create(**asked, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        return await asyncio.gather(*(one(*case) for case in cases))

    texts = asyncio.run(ask(served))
    for text, (prompt, model, options) in zip(texts, cases, strict=True):
        expected = alone(
            prompt,
            None if model == "base" else model,
            do_sample="temperature" not in options,
            seed=options["seed"],
            max_new_tokens=options["max_tokens"],
        )
        assert text == text_of(expected)
