"""Options of a generation, structured output among them, and the lengths that they allow.

Ranges are validated with the config; the forms of structured output are checked here, and what a
grammar says in lite_runner/structured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

from lite_runner.config import Invalid, invalid, read
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
from lite_runner.system.files import parse_json

if TYPE_CHECKING:
    from lite_runner.architectures.spec import Decoder
    from lite_runner.config.schema import ExportedOptions

Pooling = Literal["mean", "last"]  # of a prompt's hidden states
# Why a text ended. "stop": an eos token or a stop string; "error": see Finished.error.
FinishReason = Literal["stop", "length", "interrupted", "error"]
# Sampling options, and the value at which each has no effect.
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sampled(given: Mapping[str, Any]) -> bool | None:
    """True if options that were given together ask for sampling; None: they leave it open.

    The one rule of command line, prompts, Python and server: do_sample decides; else temperature=0
    is greedy, and another temperature, or a top_k, top_p or min_p that is not off, samples.
    """
    if given.get("do_sample") is not None:
        return bool(given["do_sample"])
    asked = sampling_options(given)
    return asked.get("temperature") != 0 if asked else None


def decided(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with do_sample, where it is decided; without a temperature of 0, for which
    do_sample=false stands."""
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
    presence_penalty: float = 0.0  # subtracted once from the logit of each generated token
    frequency_penalty: float = 0.0  # and this for each occurrence
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
            del changed["temperature"]  # expressed by do_sample
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
    disable_fallback: bool | None = None  # there is only one grammar engine
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


def stop_texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings; a single one may be given alone."""
    return (given,) if isinstance(given, str) else tuple(given or ())


def structured_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of structured output that are set among `given`, those of a run or of a prompt."""
    return {name: value for name in STRUCTURED_KEYS if (value := given.get(name)) is not None}


def structured_errors(options: GenerationConfig, asked: Mapping[str, Any]) -> Iterator[Invalid]:
    """Validation errors of malformed grammars, and of `options` that do not go with one; `asked`:
    see `structured_options`."""
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
    for key, (wanted, what) in refused.items():
        if wanted and asked:
            first = next(iter(asked))
            yield invalid((first, key), f"{what} cannot be combined with {first}")


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
        yield invalid(key, f"{where}: expected one or more texts, none of them empty")


def sampling_errors(
    config: ExportedOptions, options: GenerationConfig, given: Mapping[str, Any]
) -> Iterator[Invalid]:
    """Validation errors of `options` in a run of `config`; `given` are those that were typed, by
    name, and null where they were not."""
    yield from _sampling(options, given)
    yield from _beams(options, given)
    yield from _lengths(options)
    yield from _logits(config, options)
    yield from _structured(config, options, given)


def more_than_greedy(options: GenerationConfig) -> dict[str, str]:
    """The options that need more than the argmax of logits, as key=value by key."""
    asked = {
        "do_sample": ("true", options.do_sample),
        "num_beams": (options.num_beams, options.num_beams > 1),
        "repetition_penalty": (f"{options.repetition_penalty:g}", options.repetition_penalty != 1),
        **{key: (f"{value:g}", value != 0) for key, value in _count_penalties(options).items()},
        "min_new_tokens": (options.min_new_tokens, options.min_new_tokens > 0),
        "logprobs": (options.logprobs, options.logprobs is not None),
    }
    return {key: f"{key}={value}" for key, (value, wanted) in asked.items() if wanted}


def _count_penalties(options: GenerationConfig) -> dict[str, float]:
    return {key: getattr(options, key) for key in ("presence_penalty", "frequency_penalty")}


def _sampling(options: GenerationConfig, given: Mapping[str, Any]) -> Iterator[Invalid]:
    if given.get("do_sample") and given.get("temperature") == 0:
        yield invalid(
            ("temperature", "do_sample"),
            "temperature=0 is greedy, and do_sample=true samples; leave one of them out",
        )
    if options.do_sample and options.num_beams > 1:
        yield invalid(
            ("num_beams", *SAMPLING, "do_sample"),
            f"num_beams={options.num_beams} with {_cause(given)} is not available; beam search"
            " needs do_sample=false",
        )
    if any(text == "" for text in options.stop):
        yield invalid("stop", "stop: an empty string would end every completion at once")


def _cause(given: Mapping[str, Any]) -> str:
    """The option that makes a run sample, as key=value."""
    asked = sampling_options(given)
    if given.get("do_sample") or not asked:
        return "do_sample=true"
    name, value = next(iter(asked.items()))
    return f"{name}={value}"


def _beams(options: GenerationConfig, given: Mapping[str, Any]) -> Iterator[Invalid]:
    beams, wanted = options.num_beams, options.num_return_sequences
    keys = ("num_return_sequences", "num_beams", "do_sample")
    if beams > 1 and wanted > beams:
        yield invalid(
            keys, f"num_return_sequences: got {wanted}, expected at most num_beams={beams}"
        )
    elif beams == 1 and wanted > 1 and not options.do_sample:
        yield invalid(
            keys,
            f"num_return_sequences: got {wanted}, expected 1: greedy completions are all the"
            " same; add temperature= or num_beams=",
        )
    if beams > 1 and options.stop:
        yield invalid(
            ("stop", "num_beams"),
            f"stop strings are not available with num_beams={beams}: beams change until the end",
        )
    if beams > 1 and options.logprobs is not None:
        yield invalid(
            ("logprobs", "num_beams"),
            f"logprobs={options.logprobs} is not available with num_beams={beams}: beams change"
            " before the end",
        )
    for key, value in _count_penalties(options).items():
        if beams > 1 and value:
            yield invalid(
                (key, "num_beams"), f"{key}={value:g} is not available with num_beams={beams}"
            )
    length_penalty = given.get("length_penalty")
    if length_penalty is not None and beams == 1:
        yield invalid(
            ("length_penalty", "num_beams"),
            f"length_penalty={length_penalty:g} has an effect only with num_beams > 1",
        )


def _lengths(options: GenerationConfig) -> Iterator[Invalid]:
    for key in ("max_new_tokens", "max_length"):
        most = getattr(options, key)
        if most is not None and options.min_new_tokens > most:
            yield invalid(
                ("min_new_tokens", key),
                f"min_new_tokens: got {options.min_new_tokens}, expected at most {key}={most}",
            )
            return


def _logits(config: ExportedOptions, options: GenerationConfig) -> Iterator[Invalid]:
    """Validation errors of options that need more logits than an exported model returns."""
    key = "model.model_config.is_sample_acceleration"
    if config.model.model_config.is_sample_acceleration:
        for name, asked in more_than_greedy(options).items():
            yield invalid(
                (key, name),
                f"{key}=true returns the argmax alone, no logits, which rules out {asked}",
            )
    if options.prompt_logprobs is not None and config.in_lite:
        yield invalid(
            ("prompt_logprobs", "backend"),
            f"prompt_logprobs={options.prompt_logprobs} is not available with backend=mslite:"
            " an exported graph gives the logits of the last token alone; expected backend=native"
            " or backend=ms",
        )


def _structured(
    config: ExportedOptions, options: GenerationConfig, given: Mapping[str, Any]
) -> Iterator[Invalid]:
    asked = structured_options(given) or structured_options(vars(config))
    if not asked:
        return
    yield from structured_errors(options, asked)
    (key, *_), sampled = asked, "model.model_config.is_sample_acceleration"
    if config.model.model_config.is_sample_acceleration:
        yield invalid(
            (key, sampled), f"{sampled}=true returns the argmax alone, no logits for {key}"
        )
    if getattr(config, "names_mindformers", False):
        yield invalid(
            (key, "backend", "compare_backend"),
            f"{key}: backend=mindformers has no grammars; backend=ms does this",
        )


def length_errors(options: GenerationConfig, model: Decoder, key: str = "") -> Iterator[Invalid]:
    """`key`: the dotted key that holds the option; by default the option's own name."""
    name = options.exceeded_limit(model.seq_length)
    if name == "max_length" and options.max_length is not None:
        yield beyond_context(key or name, options.max_length, model)
    elif name == "max_new_tokens":
        yield invalid(
            (key or name, "model"),
            f"{key or name}: got {options.max_new_tokens}, expected less than the model's context"
            f" of {model.seq_length} tokens, which holds the prompt too",
        )


def beyond_context(key: str, got: int, model: Decoder) -> Invalid:
    """The validation error of a length above the model's context."""
    return invalid(
        (key, "model"),
        f"{key}: got {got}, expected at most the model's context of {model.seq_length} tokens",
    )
