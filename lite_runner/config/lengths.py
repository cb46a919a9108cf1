"""Validation errors of lengths: typed ones must fit the model's context; defaults shrink to it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import Fault, fault
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import SamplingOptions
from lite_runner.config.schema import RunConfig


def context_faults(config: SamplingOptions, model: Decoder) -> Iterator[Fault]:
    """Typed lengths that the model's context cannot hold."""
    new = config.max_new_tokens
    total = config.max_length if new is None else None  # max_new_tokens wins
    yield from _exceeded(GenerationConfig(max_new_tokens=new, max_length=total), model)


def typed_faults(config: RunConfig, typed: Collection[str]) -> Iterator[Fault]:
    """The same for the model's own lengths, where they are among the `typed` dotted keys."""
    model, settings, section = (
        config.model_config(),
        config.model.model_config,
        "model.model_config",
    )
    if model is None:
        return
    if (key := f"{section}.max_new_tokens") in typed:
        options = GenerationConfig(max_new_tokens=settings.max_new_tokens)
        yield from _exceeded(options, model, key)
    if (key := f"{section}.max_decode_length") in typed:
        yield from _exceeded(GenerationConfig(max_length=settings.max_decode_length), model, key)


def _exceeded(options: GenerationConfig, model: Decoder, key: str = "") -> Iterator[Fault]:
    """`key`: the dotted key that holds the option; by default the option's own name."""
    name = options.exceeded_limit(model.seq_length)
    if name == "max_length" and options.max_length is not None:
        yield beyond_context(key or name, options.max_length, model)
    elif name == "max_new_tokens":
        yield fault(
            (key or name, "model"),
            f"{key or name}: got {options.max_new_tokens}, expected less than the model's context"
            f" of {model.seq_length} tokens, which holds the prompt too",
        )


def beyond_context(key: str, got: int, model: Decoder) -> Fault:
    """The validation error of a length above the model's context."""
    return fault(
        (key, "model"),
        f"{key}: got {got}, expected at most the model's context of {model.seq_length} tokens",
    )
