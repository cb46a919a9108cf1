"""How long prompts and completions may be."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError


def longest_prompt(options: GenerationConfig, max_length: int) -> int:
    """Tokens a prompt may have so that all the new tokens asked for it fit `max_length`."""
    return _room(options, max_length) - _least_new(options)


def longest_sequence(prompt: int, options: GenerationConfig, max_length: int) -> int:
    """Tokens that a prompt of so many and its completion may reach together."""
    room, new = _room(options, max_length), options.max_new_tokens
    return room if new is None else min(room, prompt + new)


def check_lengths(
    lengths: Sequence[int],
    each: Sequence[GenerationConfig],
    max_length: int,
    names: Sequence[str] = (),
) -> None:
    """ConfigError naming every prompt that is empty or does not fit; call before loading.

    `lengths` are those of the prompts in tokens, `each` their options, `max_length` the tokens the
    model can hold; `names` say what the prompts are called other than by their number.
    """
    faults = []
    for index, (length, options) in enumerate(zip(lengths, each, strict=True)):
        name = names[index] if names else f"prompt {index}"
        longest, new = longest_prompt(options, max_length), _least_new(options)
        room = min(max_length, longest + new)
        if length == 0:
            faults.append(f"{name} is empty: it has no tokens")
        elif length > longest:
            faults.append(
                f"{name} does not fit: {length} tokens and {new} new, "
                f"{length + new} together, but at most {room} fit"
            )
    if faults:
        error = ConfigError.of(faults)
        error.hint = "shorten it, ask for fewer new tokens, or cut it with truncate=left"
        if all(text.endswith("no tokens") for text in faults):
            error.hint = "give it a text of at least one token, or leave it out"
        raise error


def _room(options: GenerationConfig, max_length: int) -> int:
    """Tokens that prompt and new ones may have together."""
    return min(max_length, options.max_length or max_length)


def _least_new(options: GenerationConfig) -> int:
    """New tokens that there must be room for."""
    if options.max_length is not None:
        return 1
    return 1 if options.max_new_tokens is None else options.max_new_tokens
