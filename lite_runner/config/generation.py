"""Options of a generation, structured output among them, and the lengths that they allow.

Ranges are validated with the config; the forms of structured output are checked here, and what a
grammar says in lite_runner/structured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from lite_runner.config.fields import Invalid, invalid, read
from lite_runner.records import (
    Count,
    CountPenalty,
    Index,
    NotNegative,
    Penalty,
    Probability,
    TopLogprobs,
    TopP,
    dataclass,
)
from lite_runner.system.json_file import parse_json

# Why a text ended. "stop": an eos token or a stop text; "error": see Finished.error.
Pooling = Literal["mean", "last"]  # of the hidden states of a prompt
FinishReason = Literal["stop", "length", "interrupted", "error"]
# Of sampling: each option, and the value at which it changes nothing.
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sampled(given: Mapping[str, Any]) -> bool | None:
    """True if options that were given together ask for sampling; None: they leave it open.

    The one rule of command line, prompts, Python and server: do_sample says it; else temperature=0
    is greedy, and another temperature, or a top_k, top_p or min_p that is not off, samples.
    """
    if given.get("do_sample") is not None:
        return bool(given["do_sample"])
    asked = sampling_options(given)
    return asked.get("temperature") != 0 if asked else None


def decided(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the do_sample that it means, if it means one; without a temperature of 0, which
    says no more than that."""
    asked = sampled(given)
    if asked is None:
        return dict(given)
    result = dict(given)
    if not asked and given.get("temperature") == 0:
        del result["temperature"]
    if given.get("do_sample") is None:
        result["do_sample"] = asked
    return result


def sampling_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options in `given` that ask for sampling, or with temperature=0 for none."""
    return {
        name: given[name]
        for name, off in SAMPLING.items()
        if given.get(name) is not None and (name == "temperature" or given[name] != off)
    }


def without_effect(given: Mapping[str, Any]) -> str:
    """A line about the options of sampling in `given` that are greedy together; "" for none."""
    if sampled(given) is not False:
        return ""
    asked = sampling_options(given)
    idle = [f"{name}={value}" for name, value in asked.items() if value not in (0, SAMPLING[name])]
    cause = "temperature=0" if given.get("do_sample") is None else "do_sample=false"
    return f"{', '.join(idle)}: no effect with {cause}, which is greedy" if idle else ""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RequestOptions:
    """Options that a run has for all prompts, and a prompt may have of its own; null: not given.

    To add one, add it here and to GenerationConfig, where it is computed (generation/sampling.py),
    to the requests of the server (serving/schemas.py) and, with its meaning, to
    conf/keys/sampling.yaml.
    """

    max_new_tokens: Count | None = None
    min_new_tokens: Index | None = None
    do_sample: bool | None = None
    temperature: NotNegative | None = None  # 0: greedy
    top_k: Index | None = None
    top_p: TopP | None = None
    min_p: Probability | None = None
    repetition_penalty: Penalty | None = None
    presence_penalty: CountPenalty | None = None
    frequency_penalty: CountPenalty | None = None
    stop: str | tuple[str, ...] | None = None
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None


@dataclass(frozen=True)
class GenerationConfig:
    """Options of one generation, named as in MindFormers and transformers."""

    max_new_tokens: int | None = None
    max_length: int | None = None  # prompt and new tokens; with it new tokens may be fewer
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # taken off the logit of each generated token once
    frequency_penalty: float = 0.0  # and this for each time that it was generated
    num_beams: int = 1
    length_penalty: float = 1.0
    num_return_sequences: int = 1
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    stop: tuple[str, ...] = ()  # stop strings, not part of the completion
    seed: int = 0
    logprobs: int | None = None  # of each token and its top N alternatives; None: off
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    def with_options(self, given: Mapping[str, Any]) -> GenerationConfig:
        """These options with those `given` by the names of RequestOptions, none of them null."""
        changed = decided(given)
        if not changed.get("temperature", 1):
            del changed["temperature"]  # it is said by do_sample
        if "stop" in changed:
            changed["stop"] = stop_texts(changed["stop"])
        return replace(self, **changed) if changed else self

    @property
    def reserved_tokens(self) -> int:
        """New tokens that a prompt must leave room for."""
        if self.max_length is not None or self.max_new_tokens is None:
            return 1
        return self.max_new_tokens

    def max_prompt(self, context: int) -> int:
        """Maximum prompt tokens in a context of `context` tokens; below 1 no prompt fits."""
        return self._max_total(context) - self.reserved_tokens

    def max_sequence(self, prompt: int, context: int) -> int:
        """Maximum tokens of a prompt of `prompt` tokens and its completion together."""
        limit, new = self._max_total(context), self.max_new_tokens
        return limit if new is None else min(limit, prompt + new)

    def exceeded_limit(self, context: int) -> Literal["max_new_tokens", "max_length"] | None:
        """The option that asks for more than a context of `context` tokens can hold."""
        if self.max_length is not None:
            return "max_length" if self.max_length > context else None
        too_many = self.max_new_tokens is not None and self.max_prompt(context) < 1
        return "max_new_tokens" if too_many else None

    def _max_total(self, context: int) -> int:
        return min(context, self.max_length or context)


Json = Mapping[str, object] | str  # an object, or its JSON


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class StructuredOptions:
    """The grammar that completions are restricted to, by one of these keys: those of a run for all
    prompts, or a prompt's own."""

    response_format: Json | None = None
    guided_json: Json | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    structured_outputs: Json | None = None


STRUCTURED_KEYS = tuple(field.name for field in fields(StructuredOptions))


@dataclass(frozen=True)
class _JsonSchema:
    name: str
    schema: Mapping[str, object]
    description: str | None = None
    strict: bool | None = None  # it always is


@dataclass(frozen=True)
class _ResponseFormat:
    """OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


@dataclass(frozen=True)
class _StructuredOutputs:
    """vLLM's form."""

    json: Json | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    disable_fallback: bool | None = None  # there is one engine of grammars
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


def stop_texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The texts that end a completion, of which one may stand alone."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def asked_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of structured output that are set among `given`, those of a run or of a prompt."""
    return {name: value for name in STRUCTURED_KEYS if (value := given.get(name)) is not None}


def structured_errors(options: GenerationConfig, asked: Mapping[str, Any]) -> Iterator[Invalid]:
    """Forms that are wrong, and `options` that do not go with a grammar; what is `asked`: see
    `asked_of`."""
    for name, kind in (
        ("response_format", _ResponseFormat),
        ("guided_json", Mapping[str, object]),
        ("structured_outputs", _StructuredOutputs),
    ):
        if name in asked:
            yield from _form_errors(asked[name], kind, name)
    yield from _choice_errors(asked.get("guided_choice"), "guided_choice", "guided_choice")
    refused = {
        "num_beams": (options.num_beams > 1, f"num_beams={options.num_beams}"),
        "min_new_tokens": (options.min_new_tokens > 0, f"min_new_tokens={options.min_new_tokens}"),
    }
    for key, (wanted, told) in refused.items():
        if wanted and asked:
            first = next(iter(asked))
            yield invalid((first, key), f"{told} does not go with {first}")


def _form_errors(given: Any, kind: Any, name: str) -> Iterator[Invalid]:
    try:
        if isinstance(given, str):
            given = parse_json(given)
        else:
            json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        yield invalid(name, f"{name}: not JSON: {error}")
        return
    found: list[Invalid] = []
    form = read(given, kind, name, found)
    yield from (invalid(name, one.text) for one in found)
    if isinstance(form, _ResponseFormat) and (
        (form.type == "json_schema") != (form.json_schema is not None)
    ):
        yield invalid(name, f"{name}.json_schema: expected with type=json_schema, and only there")
    if isinstance(form, _StructuredOutputs):
        yield from _choice_errors(form.choice, f"{name}.choice", name)


def _choice_errors(choices: Sequence[str] | None, where: str, key: str) -> Iterator[Invalid]:
    if choices is not None and ("" in choices or not choices):
        yield invalid(key, f"{where}: expected one text or more, none of them empty")
