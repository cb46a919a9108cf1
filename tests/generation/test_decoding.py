from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError, RunnerError
from lite_runner.generation.decoding import _best_first as best_first
from tests.generation.mock import generated

CASES = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "generation" / "beams.json").read_text()
)
VOCAB = 12


def table_logits(seed: int) -> Callable[[list[int], int], np.ndarray]:
    """The model of the fixtures: a table of the last two tokens."""
    table = np.random.default_rng(seed).normal(scale=2.0, size=(VOCAB,) * 3).astype(np.float32)

    def logits(history: list[int], adapter: int) -> np.ndarray:
        before, last = ([0, *history])[-2:]
        return table[before, last]

    return logits


def test_same_beams_as_transformers(subtests: pytest.Subtests, backend: Callable[..., Any]) -> None:
    for number, case in enumerate(CASES):
        with subtests.test(number=number):
            config = GenerationConfig(eos_token_id=tuple(case["eos"]), **case["options"])
            mock = backend(table_logits(case["seed"]), slots=config.num_beams)
            completions = generated(mock, [case["prompt"]], config).completions
            assert [c.token_ids for c in completions] == case["sequences"]
            for one in completions:
                ended = one.finish_reason == "stop"
                assert one.end_token in case["eos"] if ended else one.end_token is None
            np.testing.assert_allclose([c.score for c in completions], case["scores"], rtol=2e-5)
            assert len(mock.prefilled) == 1


def test_several_prompts_share_the_slots(backend: Callable[..., Any]) -> None:
    config = GenerationConfig(num_beams=3, num_return_sequences=2, max_new_tokens=9)
    prompts = [[1], [2, 3, 4], [5, 6], [7], [8, 9]]
    alone = [generated(backend(slots=3), [prompt], config).completions for prompt in prompts]
    together = generated(backend(slots=7), prompts, config).completions
    assert [(c.prompt_index, c.return_index) for c in together] == [
        (prompt, ret) for prompt in range(5) for ret in range(2)
    ]
    assert [c.token_ids for c in together] == [c.token_ids for part in alone for c in part]


def test_the_best_are_counted_and_in_order() -> None:
    """Of equal ones the first; as many as there are at most."""
    values = np.array([1.0, 3.0, 2.0, 3.0, 0.0])
    assert best_first(values, 3).tolist() == [1, 3, 2]
    assert best_first(values, 1).tolist() in ([1], [3])
    assert best_first(values, 5).tolist() == best_first(values, 9).tolist() == [1, 3, 2, 0, 4]


def test_hooks(backend: Callable[..., Any]) -> None:
    """No token is sure until the end, so none is shown; the end is."""
    seen: list[int] = []
    finished: list[tuple[int, int]] = []
    config = GenerationConfig(num_beams=2, num_return_sequences=2, max_new_tokens=5)
    completions = generated(
        backend(),
        [[1], [2]],
        config,
        on_token=lambda prompt, ret, token: seen.append(token),
        on_finish=lambda one: finished.append((one.prompt_index, one.return_index)),
    ).completions
    assert seen == []
    assert sorted(finished) == [(c.prompt_index, c.return_index) for c in completions]


def test_a_better_total_than_greedy(backend: Callable[..., Any]) -> None:
    """Token 1 looks best at first, but only token 0 leads on to a sure thing."""

    def logits(history: list[int], adapter: int) -> np.ndarray:
        odds = {1: [0.4, 0.6, 1e-6, 1e-6], 2: [0.25] * 4}[len(history)]
        if history[1:] == [0]:
            odds = [1e-6, 1e-6, 1.0, 1e-6]
        return np.log(np.array(odds, dtype=np.float32))

    greedy = GenerationConfig(max_new_tokens=2)
    beams = GenerationConfig(max_new_tokens=2, num_beams=2)
    assert generated(backend(logits), [[3]], greedy).completions[0].token_ids == [1, 0]
    assert generated(backend(logits), [[3]], beams).completions[0].token_ids == [0, 2]


def test_interrupt_keeps_the_running_beams(backend: Callable[..., Any]) -> None:
    mock = backend()
    forward = mock.forward

    def interrupted(rows: Any) -> Any:
        if len(mock.steps) == 3:
            raise KeyboardInterrupt
        return forward(rows)

    mock.forward = interrupted
    result = generated(mock, [[1]], GenerationConfig(num_beams=2, max_new_tokens=9))
    assert result.interrupted
    assert [c.finish_reason for c in result.completions] == ["interrupted"]
    assert len(result.completions[0].token_ids) == 3


def test_too_few_slots(backend: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="num_beams=5, but there are 4 slots"):
        generated(backend(slots=4), [[1]], GenerationConfig(num_beams=5, max_new_tokens=2))


def test_nan_names_step_and_prompt(backend: Callable[..., Any]) -> None:
    def logits(history: list[int], adapter: int) -> np.ndarray:
        return np.full(4, np.nan if len(history) == 3 else 0.0, dtype=np.float32)

    config = GenerationConfig(num_beams=2, max_new_tokens=5)
    with pytest.raises(RunnerError, match="NaN at step 2 of prompt 0"):
        generated(backend(logits), [[1]], config)
