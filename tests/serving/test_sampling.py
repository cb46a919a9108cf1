"""Structured output, through the official client: answers of a model that knows no JSON."""

from __future__ import annotations

import enum
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel, Field, TypeAdapter

from lite_runner.generation.sampling import log_softmax
from tests.each import each
from tests.generation.mock import MockBackend
from tests.serving.conftest import VOCAB, Served, Start, letters
from tests.serving.test_completions import alone, text_of

MESSAGES = [{"role": "user", "content": "hi"}]


def chaos(history: list[int], adapter: int) -> NDArray[np.float32]:
    """Logits of a model that knows nothing, the end token's too."""
    random = np.random.default_rng([adapter, len(history), *history])
    return random.normal(size=VOCAB).astype(np.float32)


@pytest.fixture
def served(start: Start) -> Served:
    return start(MockBackend(chaos, 4, 1024, 4))


class Colour(str, enum.Enum):
    RED = "red"
    GREEN = "light green"


Name = Annotated[str, Field(min_length=1, max_length=8)]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    name: Name | None


class Person(BaseModel):
    name: Name
    age: Annotated[int, Field(ge=0, le=130)]
    colour: Colour
    tall: bool
    pets: Annotated[list[Pet], Field(max_length=2)]
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3}$")]


@pytest.mark.parametrize("seed", range(6))
def test_an_answer_is_of_the_clients_model(served: Served, seed: int) -> None:
    answer = served.client.chat.completions.parse(
        model="base", messages=MESSAGES, response_format=Person, seed=seed, temperature=2
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)


def test_a_stream_is_of_the_clients_model(served: Served) -> None:
    stream = served.client.chat.completions.stream(
        model="base", messages=MESSAGES, response_format=Person, seed=1, temperature=2
    )
    with stream as events:
        parsed = events.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Person)


SCHEMAS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "integer", "minimum": -5, "maximum": 1000}, Annotated[int, Field(ge=-5, le=1000)]),
    ({"enum": ["a", 1, None, "ü\n"]}, Literal["a", 1, None, "ü\n"]),
    ({"const": {"a": [1]}}, dict[str, list[Literal[1]]]),
    (
        {"type": "array", "minItems": 2, "maxItems": 3, "items": {"type": "boolean"}},
        Annotated[list[bool], Field(min_length=2, max_length=3)],
    ),
    (
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
        Annotated[str, Field(max_length=3)] | None,
    ),
    (
        {
            "$defs": {"leaf": {"type": "null"}, "node": {"items": {"$ref": "#/$defs/leaf"}}},
            "$ref": "#/$defs/node",
            "type": "array",
            "maxItems": 2,
            "description": "no rule",
        },
        Annotated[list[None], Field(max_length=2)],
    ),
    (
        {"type": "object", "properties": {}, "additionalProperties": False, "title": "empty"},
        dict[str, Literal[0]],
    ),
]


@pytest.mark.parametrize(("schema", "kind"), SCHEMAS, ids=lambda one: str(one)[:40])
def test_all_answers_are_of_the_schema(served: Served, schema: dict[str, Any], kind: Any) -> None:
    answer = served.client.chat.completions.create(
        model="base",
        messages=MESSAGES,
        n=4,
        temperature=3,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    checked = TypeAdapter(kind)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        checked.validate_json(choice.message.content, strict=True)
    other = served.client.completions.create(
        model="base", prompt="x", temperature=3, max_tokens=999, extra_body={"guided_json": schema}
    )
    checked.validate_json(other.choices[0].text, strict=True)


def test_a_json_object(served: Served) -> None:
    """Of any keys, so that this model's may not end: it is one as far as it goes."""
    answer = served.client.chat.completions.create(
        model="base", messages=MESSAGES, response_format={"type": "json_object"}, temperature=1
    )
    text = answer.choices[0].message.content
    assert re.match(r'\{ ?(\}|")', text)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": r"[a-c]{2,4}: \d+\.\d"}, r"[a-c]{2,4}: \d+\.\d"),
    ({"guided_choice": ["yes", "no / never", "ü (*)"]}, r"yes|no / never|ü \(\*\)"),
    ({"structured_outputs": {"regex": "x{3}"}}, "xxx"),
    ({"structured_outputs": {"choice": ["a\nb"]}}, "a\nb"),
    ({"structured_outputs": {"json": {"const": 7}}}, "7"),
    ({"guided_json": '{"const": 7}'}, "7"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=lambda one: str(one))
def test_regexes_and_choices(served: Served, form: dict[str, Any], pattern: str) -> None:
    answer = served.client.completions.create(
        model="base", prompt="x", n=5, max_tokens=99, temperature=2, extra_body=form
    )
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text, re.DOTALL), choice.text


def test_neighbours_and_logprobs_are_unchanged(start: Start) -> None:
    client = start().client
    guided = {"model": "base", "messages": MESSAGES, "temperature": 0, "logprobs": True}

    def other(prompt: str) -> str:
        answer = client.completions.create(
            model="base", prompt=prompt, temperature=0, max_tokens=30
        )
        return answer.choices[0].text

    def bound() -> Any:
        form = {"guided_regex": r"[xyz]{5}-\d{5}"}
        return client.chat.completions.create(**guided, extra_body=form)

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(bound) for _ in range(3)]
        texts = [pool.submit(other, f"p{number}") for number in range(6)]
    for number, text in enumerate(texts):
        expected = text_of(alone(f"p{number}".encode(), max_new_tokens=30))
        assert text.result() == expected
    assert len({answer.result().choices[0].message.content for answer in answers}) == 1
    history = list(b"[user]hi\n[assistant]")
    for entry in answers[0].result().choices[0].logprobs.content:
        (token,) = entry.bytes
        assert entry.logprob == pytest.approx(log_softmax(letters(history, 0))[token], abs=1e-4)
        history.append(token)


def test_greedy_takes_the_likeliest_token_that_may_stand(start: Start) -> None:
    answer = start().client.completions.create(
        model="base", prompt="x", temperature=0, extra_body={"guided_regex": "[p-s]{6}"}
    )
    history = list(b"x")
    for _ in range(6):
        scores = letters(history, 0)
        history.append(ord("p") + int(scores[ord("p") : ord("s") + 1].argmax()))
    assert answer.choices[0].text == bytes(history[1:]).decode()
    assert answer.usage.completion_tokens == 7  # with the end


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": r"(a)\1"}, "guided_regex", "backreferences"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_regex": "[^\\x00-\\x{10FFFF}]"}, "guided_regex", ""),
    ({"guided_json": {"not": {}}}, "guided_json", "not"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"$ref": "http://localhost/x"}}, "guided_json", "localhost"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", ""),
    ({"guided_json": {"type": "string", "minLength": 3, "maxLength": 2}}, "guided_json", "minL"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": "[]"}, "guided_json", "expected a JSON object"),
    ({"guided_json": "[" * 100_000}, "guided_json", "not JSON"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_choice": [""]}, "guided_choice.0", "at least 1"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "combined with guided_regex"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "combined with guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "combined with guided_regex"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "not supported"),
    ({"guided_grammar": "x"}, "guided_grammar", "not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "only there"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    # What would take seconds or gigabytes.
    ({"guided_regex": "(((a{100}){100}){100}){100}"}, "guided_regex", "repeats 100,000,000 times"),
    ({"guided_regex": "(a|aa){1000}"}, "guided_regex", ""),
    ({"guided_json": {"multipleOf": 99_991}}, "guided_json", "multipleOf"),
    ({"guided_json": {"multipleOf": 200_003.5}}, "guided_json", "multipleOf"),
    (
        {"guided_json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}},
        "guided_json",
        "in all",
    ),
    ({"guided_json": {"pattern": "^(.{999}){999}$"}}, "guided_json", "repeats 998,001 times"),
    ({"guided_json": {"patternProperties": {"(.{999}){999}": {}}}}, "guided_json", "repeats"),
    ({"guided_choice": ["x" * 70_000]}, "guided_choice", "expected at most 65,536"),
    ({"guided_json": {"enum": [f"value {n}" for n in range(9000)]}}, "guided_json", "at most"),
    ({"guided_json": json.dumps(nested(450))}, "guided_json", ""),
]


@each(("form", "param", "message"), REFUSED)
def test_unsupported_fields_are_refused_by_name(
    served: Served, form: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": "base", "prompt": "x", **form}
    with pytest.raises(openai.BadRequestError) as raised:
        served.client.post("/completions", body=body, cast_to=object)
    assert raised.value.body["param"] == param
    assert message in raised.value.body["message"]


HOSTILE: list[dict[str, Any]] = [
    {"guided_regex": ".*a.{1000}b.{1000}"},
    {"guided_regex": "(.*a.{30}){30}"},
    {"guided_regex": "z((a{100}){100})"},
    {"guided_json": {"type": "integer", "multipleOf": 9973}},
    {"guided_json": {"type": "object", "properties": {f"p{n}": {} for n in range(2000)}}},
    {"guided_json": {"minItems": 10**9, "type": "array", "items": {"$ref": "#"}}},
    {"guided_json": {"anyOf": [{"pattern": f"^.*a.{{{n}}}$"} for n in range(200)]}},
    {"guided_json": {"additionalProperties": {"$ref": "#"}, "type": "object"}},
]


def test_costly_grammars_end_and_delay_no_one(served: Served) -> None:
    """Each ends with an answer or is refused; others' answers are right meanwhile."""
    client = served.client

    def hard(form: dict[str, Any]) -> str:
        try:
            answer = client.completions.create(
                model="base", prompt="x", max_tokens=200, temperature=2, extra_body=form
            )
        except openai.BadRequestError as error:
            return f"{error.body['param']}{error.body['message']}"
        return answer.choices[0].finish_reason

    asked = {"model": "base", "prompt": "hello", "temperature": 0, "max_tokens": 100}
    expected = client.completions.create(**asked).choices[0].text
    with ThreadPoolExecutor(12) as pool:
        found = [pool.submit(hard, form) for form in HOSTILE]
        others = [pool.submit(client.completions.create, **asked) for _ in range(8)]
    for form, one in zip(HOSTILE, found, strict=True):
        assert one.result() in ("stop", "length") or next(iter(form)) in one.result()
    assert {one.result().choices[0].text for one in others} == {expected}
    served.until_idle()
