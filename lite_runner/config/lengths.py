"""Validation errors of lengths: tokens to generate against the model's context.

What a user typed must fit; the defaults of a model, or of a yaml, shrink to what does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import Fault, fault
from lite_runner.config.options import SamplingOptions
from lite_runner.config.schema import RunConfig

_DEFAULTS = ("max_new_tokens", "max_decode_length")  # of model.model_config


def context_faults(config: SamplingOptions, model: Decoder) -> Iterator[Fault]:
    """Lengths that the options of the run ask for and the model's context does not hold."""
    new, together = config.max_new_tokens, config.max_length
    if new is not None and new >= model.seq_length:
        yield _too_many_new("max_new_tokens", new, model)
    elif new is None and together is not None and together > model.seq_length:
        yield _too_many("max_length", together, model)


def typed_faults(config: RunConfig, typed: Collection[str]) -> Iterator[Fault]:
    """The same of the model's own lengths that were `typed` (dotted keys), not come with it."""
    model, settings = config.model_config(), config.model.model_config
    for name in _DEFAULTS:
        key, value = f"model.model_config.{name}", getattr(settings, name)
        if model is None or value is None or key not in typed:
            continue
        if name == "max_new_tokens" and value >= model.seq_length:
            yield _too_many_new(key, value, model)
        elif value > model.seq_length:
            yield _too_many(key, value, model)


def _too_many_new(key: str, got: int, model: Decoder) -> Fault:
    return fault(
        (key, "model"),
        f"{key}: got {got}, expected less than the model's context of {model.seq_length} tokens,"
        " which holds the prompt too",
    )


def _too_many(key: str, got: int, model: Decoder) -> Fault:
    return fault(
        (key, "model"),
        f"{key}: got {got}, expected at most the model's context of {model.seq_length} tokens",
    )
