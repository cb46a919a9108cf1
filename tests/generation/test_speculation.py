"""Drafts by prompt lookup: the same tokens, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Engine, Generation, Request
from lite_runner.generation.speculation import MOST_DRAFTED, PromptLookup, StepCost
from tests.generation.mock import MockBackend, cycling_logits
from tests.generation.scenarios import Run, Scenario, same, scenarios
from tests.generation.test_scheduler import check_texts

REPEATED = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as long as they may be, though nothing was timed."""
    monkeypatch.setattr(StepCost, "most", lambda *_: MOST_DRAFTED)


def drafter(*tokens: int) -> PromptLookup:
    return PromptLookup(np.array(tokens, np.int32))


@pytest.mark.usefixtures("eager")
@settings(max_examples=80)
@given(scenarios())
def test_texts_do_not_depend_on_drafts(scenario: Scenario) -> None:
    check_texts(Run(replace(scenario, speculate=True), cycling_logits).go(), cycling_logits)


def generated(backend: MockBackend, *, speculate: bool, **options: Any) -> Generation:
    request = Request(
        np.array([*REPEATED, *REPEATED], np.int32), GenerationConfig(max_new_tokens=40, **options)
    )
    return Engine(backend, speculate=speculate).generate([request])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"repetition_penalty": 1.1}])
def test_repeated_text_takes_fewer_steps(
    backend: Callable[..., MockBackend], options: dict[str, Any]
) -> None:
    plain, fast = (backend(slots=1, max_length=100, logits=cycling_logits) for _ in range(2))
    expected = generated(plain, speculate=False, logprobs=2, **options)
    got = generated(fast, speculate=True, logprobs=2, **options)
    assert same(got.completions[0], expected.completions[0])
    timing = got.timing
    assert timing.decode_tokens == expected.timing.decode_tokens == 39
    assert 0 < timing.accepted_tokens <= timing.drafted_tokens
    assert len(plain.steps) - len(fast.steps) == timing.accepted_tokens
    assert expected.timing.drafted_tokens == 0
    # Nothing is drafted where the rows of a draft would not have the logits of single ones.
    for info in ({"chunk": 4}, {"can_continue": False}, {"short_length": 60}):
        other = backend(slots=1, max_length=100, logits=cycling_logits, **info)
        timing = generated(other, speculate=True, **options).timing
        assert timing.decode_tokens and not timing.drafted_tokens, info


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("place", range(1, 24))
def test_tokens_behind_a_stop_string_are_dropped(
    backend: Callable[..., MockBackend], place: int
) -> None:
    """Wherever in a step it is, the last step too."""

    def stopped(*, speculate: bool) -> tuple[list[int], Generation]:
        heard: list[int] = []

        def on_token(_: int, __: int, token: int) -> bool:
            heard.append(token)
            return len(heard) == place

        options = GenerationConfig(max_new_tokens=24, logprobs=1)
        request = Request(np.array([*REPEATED, *REPEATED], np.int32), options)
        engine = Engine(
            backend(slots=1, max_length=100, logits=cycling_logits), speculate=speculate
        )
        return heard, engine.generate([request], on_token=on_token)

    (heard, got), (expected_heard, expected) = stopped(speculate=True), stopped(speculate=False)
    assert heard == expected_heard == got.completions[0].token_ids
    assert same(got.completions[0], expected.completions[0])
    assert got.completions[0].finish_reason == "stop"


def test_drafts_follow_the_newest_occurrence_of_the_longest_match() -> None:
    assert drafter(1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 7, 1, 2, 3, 4).draft(2) == [8, 7]
    assert drafter(5, 1, 2, 3, 6, 6, 2, 3, 9, 1, 2, 3).draft(3) == [6, 6, 2]
    assert drafter(1, 2, 3).draft(3) == drafter(1).draft(3) == []
    assert drafter(4, 4, 4).draft(3) == [4]
    one = drafter(1, 2, 3, 1, 2)
    assert one.draft(0) == [] and one.draft(1) == one.draft(1) == [3]


def test_a_match_is_followed_to_its_end() -> None:
    one = drafter(1, 2, 7, 8, 9, 5, 1, 2)
    assert one.draft(2) == [7, 8]
    one.extend([7], 0)
    assert one.draft(2) == [8, 9]
    one.extend([8, 9, 5], 2)
    assert one.draft(3) == [1, 2]
    one.extend([6], 2)
    assert one.draft(3) == []


def test_the_rate_of_acceptance_is_known_without_drafts() -> None:
    one = drafter(1, 2, 3, 4, 1, 2)
    first = one.rate
    one.draft(0)
    one.extend([3], 0)
    assert one.rate > first
    second = one.rate
    one.draft(0)
    one.extend([15], 0)
    assert one.rate < second
    third = one.rate
    assert one.draft(4) == []
    one.extend([14], 0)
    assert one.rate == third  # nothing was expected


def test_drafts_wait_until_two_guesses_were_right() -> None:
    one, cost = drafter(1, 2, 3, 4, 5, 1, 2), StepCost()
    cost.took(1, 0, 0, 0.01)
    for token in (3, 4):
        assert cost.most(1, one.rate) == 0
        one.draft(0)
        one.extend([token], 0)
    assert cost.most(1, one.rate) > 0


def test_drafts_have_to_pay() -> None:
    cost = StepCost()
    assert cost.most(1, 0.9) == 0  # no step has been timed
    cost.took(1, 0, 0, 0.01)
    assert cost.most(1, 0.9) > cost.most(1, 0.5) > 0 == cost.most(1, 0.1)
    assert cost.most(1, 1.0) == MOST_DRAFTED
    cost.took(8, 0, 0, 0.02)
    assert cost.most(8, 0.95) > 0 == cost.most(8, 0.7)  # a token of eight is worth less
    for _ in range(20):
        cost.took(8, 4, 4, 0.021)
    assert cost.most(8, 0.7) > 0
    cost.took(1, 4, 4, 0.1)  # slow
    assert cost.most(1, 1.0) == 0
    for _ in range(500):
        cost.took(1, 0, 0, 0.01)
    assert cost.most(1, 1.0) > 0  # tried again, later
