"""Limits on the lengths of prompts and completions."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError


def longest_prompt(options: GenerationConfig, max_length: int) -> int:
    """Maximum prompt tokens so that the requested new tokens fit `max_length`."""
    return _total_limit(options, max_length) - _least_new(options)


def longest_sequence(prompt: int, options: GenerationConfig, max_length: int) -> int:
    """Maximum tokens of a prompt of `prompt` tokens and its completion together."""
    limit, new = _total_limit(options, max_length), options.max_new_tokens
    return limit if new is None else min(limit, prompt + new)


def longest_of_all(
    prompts: Sequence[int], each: Sequence[GenerationConfig], max_length: int
) -> int:
    """Maximum tokens of the longest sequence; `prompts`: prompt lengths, `each`: their options."""
    pairs = zip(prompts, each, strict=True)
    return max(longest_sequence(prompt, options, max_length) for prompt, options in pairs)


def truncate_left(ids: list[int], longest: int, bos: int | None) -> list[int]:
    """The last `longest` tokens of a prompt; a leading bos stays."""
    if len(ids) <= longest or longest < 2:
        return ids
    return [ids[0], *ids[1 - longest :]] if ids[0] == bos else ids[-longest:]


def check_lengths(
    lengths: Sequence[int],
    each: Sequence[GenerationConfig],
    max_length: int,
    names: Sequence[str] = (),
) -> None:
    """Raise ConfigError naming every prompt that is empty or does not fit; call before loading.

    `lengths`: prompt lengths in tokens; `each`: their options; `max_length`: the model's limit in
    tokens; `names`: names of the prompts instead of their numbers.
    """
    faults = []
    for index, (length, options) in enumerate(zip(lengths, each, strict=True)):
        name = names[index] if names else f"prompt {index}"
        longest, new = longest_prompt(options, max_length), _least_new(options)
        limit = min(max_length, longest + new)
        if length == 0:
            faults.append(f"{name} is empty: it has no tokens")
        elif length > longest:
            faults.append(
                f"{name} does not fit: {length} tokens and {new} new, "
                f"{length + new} together, but at most {limit} fit"
            )
    if faults:
        error = ConfigError.of(faults)
        error.hint = "shorten it, ask for fewer new tokens, or cut it with truncate=left"
        if all(text.endswith("no tokens") for text in faults):
            error.hint = "give it a text of at least one token, or leave it out"
        raise error


def _total_limit(options: GenerationConfig, max_length: int) -> int:
    """Maximum tokens of prompt and completion together."""
    return min(max_length, options.max_length or max_length)


def _least_new(options: GenerationConfig) -> int:
    """New tokens that must fit."""
    if options.max_length is not None:
        return 1
    return 1 if options.max_new_tokens is None else options.max_new_tokens
