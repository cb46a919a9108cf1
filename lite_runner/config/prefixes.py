"""Prompts of a prefix LM (ChatGLM-6B), which must say where their prefix ends."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.architectures import prefix as prefixes
from lite_runner.architectures.spec import Prefix
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError


def check_prefixes(
    prefix: Prefix | None,
    prompts: Sequence[Sequence[int]],
    each: Sequence[GenerationConfig],
    names: Sequence[str] = (),
) -> None:
    """Raise ConfigError for prompts without the tokens that `prefix` needs, and for the likelihoods
    of prompts, whose tokens see those behind them; None: any prompt will do. `each`: their options;
    `names`: names of the prompts instead of their numbers."""
    if prefix is None:
        return
    if any(options.prompt_logprobs is not None for options in each):
        raise ConfigError(*no_likelihood("prompt_logprobs"))
    faults = []
    for index, tokens in enumerate(prompts):
        if fault := prefixes.fault(prefix, tokens):
            faults.append(f"{names[index] if names else f'prompt {index}'} {fault}")
    if faults:
        error = ConfigError.of(faults)
        error.hint = (
            "the model's own tokenizer appends both to a text; give them in prompts of token ids"
        )
        raise error


def with_ending(prefix: Prefix | None, tokens: list[int]) -> list[int]:
    """The tokens of a text with what ends a prefix, as the model's own tokenizer appends it; the
    byte tokenizer and others do not."""
    if prefix is None or prefix.end_token_id in tokens:
        return tokens
    return [*tokens, prefix.mask_token_ids[0], prefix.end_token_id]


def no_likelihood(key: str) -> tuple[str, str]:
    """Message and hint for what needs the likelihood of a prompt's tokens."""
    return (
        f"{key}: each token of a prefix sees those behind it, so a prompt's tokens have no"
        " likelihood",
        "logprobs gives those of the generated tokens",
    )
