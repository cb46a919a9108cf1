"""Validation errors of generation options and lengths: a run's, or a prompt's own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import Invalid, invalid
from lite_runner.config.generation import (
    SAMPLING,
    GenerationConfig,
    asked_of,
    sampling_options,
    structured_errors,
)
from lite_runner.config.prompt import Request
from lite_runner.config.schema import CompareOptions, ExportedOptions, RunConfig, SamplingOptions


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


def request_option_errors(
    config: ExportedOptions, shared: GenerationConfig, request: Request
) -> list[str]:
    """Validation errors of a prompt's options, with each other and with the run's (`shared`)."""
    own = request.own | request.structured
    if not own:
        return []
    every = sampling_errors(config, request.options(shared), own)
    return [one.text for one in every if not own.keys().isdisjoint(one.keys)]


def more_than_greedy(options: GenerationConfig) -> dict[str, str]:
    """The options that need more than the argmax of logits, as key=value by key."""
    asked = {
        "do_sample": ("true", options.do_sample),
        "num_beams": (options.num_beams, options.num_beams > 1),
        "repetition_penalty": (
            f"{options.repetition_penalty:g}",
            options.repetition_penalty != 1,
        ),
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
    """Options that need more logits than an exported model returns."""
    key = "model.model_config.is_sample_acceleration"
    if config.model.model_config.is_sample_acceleration:
        for name, asked in more_than_greedy(options).items():
            yield invalid(
                (key, name),
                f"{key}=true returns the argmax alone, no logits, so {asked} cannot be done",
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
    asked = asked_of(given) or asked_of(vars(config))
    if not asked:
        return
    yield from structured_errors(options, asked)
    (key, *_), sampled = asked, "model.model_config.is_sample_acceleration"
    if config.model.model_config.is_sample_acceleration:
        yield invalid(
            (key, sampled), f"{sampled}=true returns the argmax alone, no logits for {key}"
        )
    if isinstance(config, CompareOptions) and config.names_mindformers:
        yield invalid(
            (key, "backend", "compare_backend"),
            f"{key}: backend=mindformers has no grammars; backend=ms does this",
        )


def context_errors(config: SamplingOptions, model: Decoder) -> Iterator[Invalid]:
    """Typed lengths that the model's context cannot hold."""
    new = config.max_new_tokens
    total = config.max_length if new is None else None  # max_new_tokens wins
    yield from _exceeded(GenerationConfig(max_new_tokens=new, max_length=total), model)


def typed_errors(config: RunConfig, typed: Collection[str]) -> Iterator[Invalid]:
    """The same for the model's own lengths among the `typed` dotted keys."""
    model, settings, section = (
        config.model_config(),
        config.model.model_config,
        "model.model_config",
    )
    for key in ("model", "load_checkpoint"):
        if key in typed and getattr(getattr(config, "serve", None), "models", None):
            yield invalid(key, f"{key} has no effect with serve.models: name the model there")
    if model is None:
        return
    if (key := f"{section}.max_new_tokens") in typed:
        options = GenerationConfig(max_new_tokens=settings.max_new_tokens)
        yield from _exceeded(options, model, key)
    if (key := f"{section}.max_decode_length") in typed:
        yield from _exceeded(GenerationConfig(max_length=settings.max_decode_length), model, key)


def _exceeded(options: GenerationConfig, model: Decoder, key: str = "") -> Iterator[Invalid]:
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
