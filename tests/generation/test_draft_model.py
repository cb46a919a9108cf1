"""Drafts by a model: the same tokens for any drafts, and no more time than it gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lite_runner.backends import Row
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Engine, Generation, Request
from lite_runner.generation.draft_model import DraftModel, DraftSequence, NextTokenDrafts
from lite_runner.generation.speculation import MOST_DRAFTED, StepCost
from tests.generation.mock import Logits, MockBackend, cycling_logits, hashed_logits
from tests.generation.scenarios import LENGTH, Run, Scenario, same, scenarios
from tests.generation.test_scheduler import check_texts

Make = Callable[..., MockBackend]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as long as they may be, whatever they cost."""
    monkeypatch.setattr(StepCost, "worth", lambda *_: MOST_DRAFTED)
    monkeypatch.setattr(DraftModel, "took", lambda *_: None)


def with_draft(model: MockBackend, draft: MockBackend) -> MockBackend:
    model.draft = draft  # type: ignore[attr-defined]
    return model


@dataclass(frozen=True)
class DraftedScenario(Scenario):
    """A scenario in which a model drafts."""

    draft_logits: Logits
    draft_info: dict[str, Any]

    def backend(self, logits: Logits) -> MockBackend:
        model = super().backend(logits)
        if not self.speculate:
            return model
        return with_draft(
            model, MockBackend(self.draft_logits, model.info.slots, **self.draft_info)
        )


@pytest.mark.usefixtures("eager")
@settings(max_examples=60)
@given(
    scenarios(),
    st.sampled_from([cycling_logits, hashed_logits]),
    st.sampled_from([LENGTH, LENGTH // 2]),
    st.integers(0, 20),
    st.sampled_from([None, 1, 5, 20]),
)
def test_texts_do_not_depend_on_the_draft_model(
    scenario: Scenario, logits: Logits, length: int, blocks: int, window: int | None
) -> None:
    info: dict[str, Any] = {"max_length": length, "adapter_slots": 0, "budget": 16}
    if blocks:
        info["memory"] = (8, blocks)
        info["window"] = None if window is None else (window, info["budget"])
    drafted = DraftedScenario(
        **{**vars(scenario), "speculate": True}, draft_logits=logits, draft_info=info
    )
    check_texts(Run(drafted, cycling_logits).go(), cycling_logits)


def generated(model: MockBackend, *prompts: list[int], **options: Any) -> Generation:
    chosen = GenerationConfig(max_new_tokens=40, **options)
    return Engine(model).generate(
        [Request(np.array(one, np.int32), chosen) for one in prompts or ([1, 2, 3, 5, 8],)]
    )


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"repetition_penalty": 1.1}])
def test_a_model_that_drafts_its_own_tokens_has_all_accepted(
    backend: Make, options: dict[str, Any]
) -> None:
    plain, fast, draft = (backend(slots=2, max_length=100) for _ in range(3))
    expected = generated(plain, logprobs=2, **options)
    got = generated(with_draft(fast, draft), logprobs=2, **options)
    assert same(got.completions[0], expected.completions[0])
    timing = got.timing
    assert timing.decode_tokens == expected.timing.decode_tokens
    assert len(plain.steps) - len(fast.steps) == timing.accepted_tokens
    if not options:
        assert timing.accepted_tokens == timing.drafted_tokens > 30


@pytest.mark.usefixtures("eager")
def test_drafts_of_another_model_are_rarely_accepted(backend: Make) -> None:
    model = with_draft(backend(), backend(logits=cycling_logits))
    timing = generated(model).timing
    assert timing.drafted_tokens > 100 > 30 > timing.accepted_tokens


@pytest.mark.usefixtures("eager")
def test_a_long_text_is_read_in_parts_and_a_known_one_is_not_read_again(backend: Make) -> None:
    draft = backend(slots=2, max_length=1000)
    model = with_draft(backend(slots=2, max_length=1000), draft)
    prompt = [token % 16 for token in range(600)]
    engine = Engine(model)

    def run(*more: int) -> list[int]:
        draft.steps.clear()
        options = GenerationConfig(max_new_tokens=12)
        engine.generate([Request(np.array([*prompt, *more], np.int32), options)])
        return [len(row.tokens) for step in draft.steps for row in step]

    first = run()
    assert max(first) < 300 and sum(first) > 600
    assert sum(run(3, 1, 2)) < 50


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("own", [True, False])  # all drafts are accepted; nearly none is
def test_a_draft_model_with_windows_gives_their_blocks_back(backend: Make, own: bool) -> None:
    prompt = [3 * token % 16 for token in range(90)]
    prompts = prompt, [*prompt[:30], 4, 4, 4], prompt[:50]  # each goes on from the one before
    draft = backend(
        hashed_logits if own else cycling_logits,
        slots=1,
        max_length=200,
        budget=16,
        memory=(4, 50),
        window=(6, 16),
    )
    assert draft.info.windows is not None and draft.info.windows.blocks < 8
    engine = Engine(with_draft(backend(slots=1, max_length=200), draft))
    for one in prompts:
        request = [Request(np.array(one, np.int32), GenerationConfig(max_new_tokens=40))]
        plain = Engine(backend(slots=1, max_length=200)).generate(request)
        assert same(engine.generate(request).completions[0], plain.completions[0])
    assert len(draft.prefilled) == 3  # what the first tokens after a prefix see was given back


def asked(model: DraftModel, *sequences: DraftSequence) -> list[int]:
    """The number of drafted tokens of each."""

    class DecodingStrategy:
        def drafts(self, most: Callable[[float], int]) -> list[list[int]]:
            return [one.draft(most(one.rate)) for one in sequences]

    model.draft(lambda _: 2, [SimpleNamespace(strategy=DecodingStrategy())])  # type: ignore[list-item]
    return [len(one.drafted) for one in sequences]


def test_reading_costs_have_to_be_gained(backend: Make) -> None:
    model = DraftModel(backend(max_length=100), 16)
    long, late = (model.sequence(np.arange(50, dtype=np.int32) % 16) for _ in range(2))
    short = model.sequence(np.array([1, 2], np.int32))
    model.took(3, 0, 0, 0.01)
    assert asked(model, long, late, short) == [2, 0, 2]  # one reads at a time
    model.took(3, 4, 2, 1.0)  # much more than was gained
    for one in (long, short):
        one.extend([one.drafted[0]], 2)
    assert asked(model, long, late, short) == [2, 0, 2]
    for _ in range(200):
        model.took(3, 0, 0, 1.0)
    assert asked(model, late) == [2]


def test_the_rate_of_acceptance_is_shared_with_later_sequences(backend: Make) -> None:
    model = DraftModel(backend(), 16)
    one = model.sequence(np.array([1, 2, 3], np.int32))
    first = one.rate
    asked(model, one)
    one.extend([(one.drafted[0] + 1) % 16], 2)
    assert (
        one.rate
        < model.rate
        < first
        == model.sequence(np.array([1], np.int32)).rate + (first - model.rate)
    )
    low = one.rate
    one.extend([4], 0)  # not drafted for: tried again, later
    assert low < one.rate < first


def test_tokens_that_the_draft_model_lacks_are_not_given_to_it(backend: Make) -> None:
    model = DraftModel(backend(logits=lambda tokens, _: np.eye(8, dtype=np.float32)[1]), 16)
    assert asked(model, model.sequence(np.array([9, 1], np.int32))) == [0]
    assert asked(model, model.sequence(np.array([7, 1], np.int32))) == [2]


def test_a_layer_backs_off_where_its_drafts_do_not_pay() -> None:
    class Wrong:
        def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
            return [[15] * count for count in counts]

    model = NextTokenDrafts(Wrong())
    sequence, drafted = model.sequence(np.array([1, 2], np.int32)), 0
    for _ in range(3000):
        most = model.most(1, sequence.rate)
        sequence.draft(most)
        sequence.drafted = [15] * most
        sequence.extend([1], most)
        drafted += most
        model.took(1, most, 0, 0.01 * (1 + 0.3 * most))
    assert 0 < 0.3 * drafted < 3000 * 0.012
    for _ in range(500):  # of another text
        most = max(1, model.most(1, sequence.rate))
        sequence.drafted = [1] * most
        sequence.extend([1] * (most + 1), most)
        model.took(1, most, most, 0.01 * (1 + 0.3 * most))
    assert model.most(1, sequence.rate) == MOST_DRAFTED


@pytest.mark.usefixtures("eager")
def test_the_text_drafted_for_longest_ago_gives_all_of_its_blocks_back(backend: Make) -> None:
    draft = backend(slots=3, max_length=64, memory=(8, 8))
    model = DraftModel(draft, 16)
    first, second, third = (model.sequence(np.full(16, token, np.int32)) for token in (1, 2, 3))

    def draft_for(sequence: DraftSequence) -> None:
        strategy = SimpleNamespace(drafts=lambda most: sequence.draft(1))
        model.draft(lambda _: 1, [SimpleNamespace(strategy=strategy)])  # type: ignore[list-item]

    draft_for(first)
    draft_for(second)
    first.extend([5], 0)
    draft_for(first)
    slot = second.slot
    assert None not in (first.slot, slot)
    draft_for(third)
    assert second.slot is None and None not in (first.slot, third.slot)
    assert draft.pool is not None and (draft.pool.tables[slot] == -1).all()
