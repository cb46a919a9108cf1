"""Validation errors of generation options: a run's, or a prompt's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lite_runner.config.fields import Fault, fault
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import ExportedOptions
from lite_runner.config.prompt import Request


def sampling_faults(
    config: ExportedOptions, options: GenerationConfig, given: Mapping[str, Any]
) -> Iterator[Fault]:
    """Validation errors of `options` in a run of `config`; `given` are those that were typed, by
    name, and null where they were not."""
    yield from _sampling(options, given)
    yield from _beams(options, given)
    yield from _lengths(options)
    yield from _logits(config, options)


def request_option_faults(
    config: ExportedOptions, shared: GenerationConfig, request: Request
) -> list[str]:
    """Validation errors of a prompt's options, with each other and with the run's (`shared`)."""
    own = request.own
    if not own:
        return []
    every = sampling_faults(config, request.options(shared), own)
    return [one.text for one in every if not own.keys().isdisjoint(one.keys)]


def more_than_greedy(options: GenerationConfig) -> dict[str, str]:
    """What of these options needs logits, as key=value by its key: more than the argmax."""
    asked = {
        "do_sample": ("true", options.do_sample),
        "num_beams": (options.num_beams, options.num_beams > 1),
        "repetition_penalty": (
            f"{options.repetition_penalty:g}",
            options.repetition_penalty != 1,
        ),
        "min_new_tokens": (options.min_new_tokens, options.min_new_tokens > 0),
        "logprobs": (options.logprobs, options.logprobs is not None),
    }
    return {key: f"{key}={value}" for key, (value, wanted) in asked.items() if wanted}


def _sampling(options: GenerationConfig, given: Mapping[str, Any]) -> Iterator[Fault]:
    if not options.do_sample:
        for key, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            value = given.get(key)
            if value not in (None, off):
                yield fault(
                    (key, "do_sample"),
                    f"{key}={value:g} has an effect only with sampling; add do_sample=true",
                )
    elif options.num_beams > 1:
        yield fault(
            ("num_beams", "do_sample"),
            f"num_beams={options.num_beams} with do_sample=true is not available; beam search"
            " needs do_sample=false",
        )
    if any(text == "" for text in options.stop):
        yield fault("stop", "stop: an empty string would end every completion at once")


def _beams(options: GenerationConfig, given: Mapping[str, Any]) -> Iterator[Fault]:
    beams, wanted = options.num_beams, options.num_return_sequences
    keys = ("num_return_sequences", "num_beams", "do_sample")
    if beams > 1 and wanted > beams:
        yield fault(keys, f"num_return_sequences: got {wanted}, expected at most num_beams={beams}")
    elif beams == 1 and wanted > 1 and not options.do_sample:
        yield fault(
            keys,
            f"num_return_sequences: got {wanted}, expected 1: greedy completions are all the"
            " same; add do_sample=true or num_beams=",
        )
    if beams > 1 and options.stop:
        yield fault(
            ("stop", "num_beams"),
            f"stop strings are not available with num_beams={beams}: beams change until the end",
        )
    if beams > 1 and options.logprobs is not None:
        yield fault(
            ("logprobs", "num_beams"),
            f"logprobs={options.logprobs} is not available with num_beams={beams}: beams change"
            " before the end",
        )
    length_penalty = given.get("length_penalty")
    if length_penalty is not None and beams == 1:
        yield fault(
            ("length_penalty", "num_beams"),
            f"length_penalty={length_penalty:g} has an effect only with num_beams > 1",
        )


def _lengths(options: GenerationConfig) -> Iterator[Fault]:
    for key in ("max_new_tokens", "max_length"):
        most = getattr(options, key)
        if most is not None and options.min_new_tokens > most:
            yield fault(
                ("min_new_tokens", key),
                f"min_new_tokens: got {options.min_new_tokens}, expected at most {key}={most}",
            )
            return


def _logits(config: ExportedOptions, options: GenerationConfig) -> Iterator[Fault]:
    """Options that need more logits than an exported model returns."""
    key = "model.model_config.is_sample_acceleration"
    if config.model.model_config.is_sample_acceleration:
        for name, asked in more_than_greedy(options).items():
            yield fault(
                (key, name),
                f"{key}=true returns the argmax alone, no logits, so {asked} cannot be done",
            )
    if (
        options.prompt_logprobs is not None
        and not config.takes_packed
        and (config.backend == "mslite" or (config.backend == "auto" and config.runs_given_model))
    ):
        yield fault(
            ("prompt_logprobs", "backend"),
            f"prompt_logprobs={options.prompt_logprobs} is not available with backend=mslite:"
            " an exported graph gives the logits of the last token alone; expected backend=ms, or"
            " engine=native",
        )
