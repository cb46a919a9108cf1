"""Prompt lengths: whether prompts fit the model's context, and truncating those that do not."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError


def max_sequence_of(
    prompts: Sequence[int], each: Sequence[GenerationConfig], max_length: int
) -> int:
    """Maximum tokens of the longest sequence; `prompts`: prompt lengths, `each`: their options."""
    pairs = zip(prompts, each, strict=True)
    return max(options.max_sequence(prompt, max_length) for prompt, options in pairs)


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
        longest, new = options.max_prompt(max_length), options.reserved_tokens
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
