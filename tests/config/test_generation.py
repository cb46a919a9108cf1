"""The lengths that the options of a generation allow."""

from __future__ import annotations

import pytest

from lite_runner.config.generation import GenerationConfig


@pytest.mark.parametrize(
    "options, exceeded, prompt, sequence",
    [
        (GenerationConfig(), None, 9, 10),
        (GenerationConfig(max_new_tokens=4), None, 6, 7),
        (GenerationConfig(max_new_tokens=9), None, 1, 10),
        (GenerationConfig(max_new_tokens=10), "max_new_tokens", 0, 10),
        (GenerationConfig(max_new_tokens=0), None, 10, 3),
        (GenerationConfig(max_length=8), None, 7, 8),
        (GenerationConfig(max_length=11), "max_length", 9, 10),
        (GenerationConfig(max_new_tokens=900, max_length=10), None, 9, 10),
    ],
)
def test_lengths_in_a_context_of_10_tokens(
    options: GenerationConfig, exceeded: str | None, prompt: int, sequence: int
) -> None:
    assert options.exceeded_limit(10) == exceeded
    assert options.max_prompt(10) == prompt
    assert options.max_sequence(3, 10) == sequence
