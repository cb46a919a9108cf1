"""Prompts continue from tokens in slots, as far as they match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lite_runner.generation import Completion, Engine, Request
from tests.generation.mock import MockBackend, asked, cached_logits, served, tokens_alone

TEXT, OTHER, THIRD = np.random.default_rng(2).integers(0, 16, (3, 48)).tolist()
Backends = Callable[..., Any]


@pytest.fixture(autouse=True)
def short_prompts_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lite_runner.generation.slots._SHORTEST_COPY", 4)


def in_order(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    return [one for _, one in sorted(served(engine, requests).items())]


def test_never_across_adapters(backend: Backends) -> None:
    """Nor from one that was there under the name before."""
    mock = backend(slots=8)
    engine = Engine(mock)

    def cached(adapter: str | None) -> int:
        request = asked(TEXT, adapter=adapter)
        (completion,) = in_order(engine, [request])
        fresh = backend()
        fresh.adapters.known |= mock.adapters.known
        assert [completion.token_ids] == tokens_alone(lambda: fresh, [request])
        return completion.cached_tokens

    names = [None, "a", "b", None, "a", "b"]
    assert [cached(name) for name in names] == [0, 0, 0, 47, 47, 47]
    mock.adapters.replace("a")
    assert [cached(name) for name in names] == [47, 0, 47, 47, 47, 47]


def test_never_across_the_length_of_longropes_short_factors(backend: Backends) -> None:
    """A text that grows beyond it is prefilled again, in chunks and each of its sequences."""
    mock = backend(slots=3, short_length=20)
    engine = Engine(mock, 10)

    def cached(length: int, new: int = 1, sequences: int = 1) -> int:
        options = {"num_return_sequences": sequences}
        found = in_order(engine, [asked(TEXT[:length], new, options=options)])
        return found[0].cached_tokens

    assert [cached(12), cached(18), cached(20)] == [0, 12, 18]
    assert [cached(21), cached(30)] == [0, 21]
    mock.steps.clear()
    cached(17, 6, 3)
    again = [row for step in mock.steps for row in step if row.length == 21]
    assert sorted({row.slot for row in again}) == [0, 1, 2]
    # The first one whole, of the others what is behind the prompt.
    assert [len(row.tokens) for row in again] == [10, 10, 1, 4, 4]
    assert [row.position for row in again] == [0, 10, 20, 17, 17]


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_computed_part_of_a_prompt_is_reused(backend: Backends, steps: int, chunk: int) -> None:
    """By one that waited for it, and by one that came later."""
    engine = Engine(backend(slots=4, chunk=chunk), 10)
    request = asked(TEXT)
    first, waiting = engine.add(request), engine.add(request)
    for _ in range(steps):
        engine.step()
    engine.finish(first)
    later = engine.add(request)
    found = served(engine)
    computed = steps * 10 // chunk * chunk if chunk == 1 else steps * 8
    assert found[waiting].cached_tokens == computed
    assert found[later].cached_tokens >= computed
    wanted = tokens_alone(backend, [request] * 2)
    assert [found[waiting].token_ids, found[later].token_ids] == wanted


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_conversation_goes_on_from_its_answer_where_cuts_do_not_show(
    backend: Backends, chunk: int
) -> None:
    """Else from its last prompt alone: answers were computed token by token."""
    engine = Engine(backend(slots=2, chunk=chunk))
    (first,) = in_order(engine, [asked(TEXT[:22], 9)])
    again = asked([*TEXT[:22], *first.token_ids, 1, 2], 4)
    (second,) = in_order(engine, [again])
    assert second.cached_tokens == {1: 22 + 8, 4: 20}[chunk]  # the last token was never computed
    assert [second.token_ids] == tokens_alone(backend, [again])


@pytest.mark.parametrize("chunk", [1, 8])
def test_a_prompt_that_was_scored_is_gone_on_from_where_cuts_do_not_show(
    backend: Backends, chunk: int
) -> None:
    """Else its pieces may be shorter than those that a prompt has otherwise."""
    engine = Engine(backend(slots=2, chunk=chunk, most_logits=4))
    scored = asked(TEXT, options={"prompt_logprobs": 0})
    in_order(engine, [scored])
    (later,) = in_order(engine, [asked(TEXT)])
    assert later.cached_tokens == {1: 47, 8: 0}[chunk]
    first, waited = in_order(Engine(backend(slots=2, chunk=chunk)), [scored, asked(TEXT)])
    assert (first.cached_tokens, waited.cached_tokens) == (0, {1: 47, 8: 0}[chunk])


def test_without_a_prefix_cache_nothing_is_shared(backend: Backends) -> None:
    engine = Engine(backend(), prefix_cache=False)
    found = in_order(engine, [asked(TEXT), asked(TEXT)])
    assert [one.cached_tokens for one in found] == [0, 0]


def test_a_source_that_is_taken_over_at_once(backend: Backends) -> None:
    """It is read before its new prompt is written, by all who go on from what it was."""
    mock = backend(slots=3)
    engine = Engine(mock)
    for text in (TEXT, OTHER, THIRD):
        served(engine, [asked(text)])
    requests = [
        asked([*TEXT[:10], 1, 2, 3]),  # a copy, since the rest of TEXT would be lost
        asked(THIRD[::-1]),  # takes the slot of TEXT
        asked([*TEXT[:10], 4]),  # a copy of the copy
    ]
    found = in_order(engine, requests)
    assert mock.copies == [([0], [1]), ([1], [2])]
    assert [one.cached_tokens for one in found] == [10, 0, 10]
    assert [one.token_ids for one in found] == tokens_alone(backend, requests)


def test_a_beginning_is_computed_once_for_a_chain(backend: Backends) -> None:
    """Each goes on from the one before, all of them asked for at once."""
    mock = backend(slots=4)
    requests = [asked(TEXT[:length]) for length in (12, 24, 36, 48)]
    found = in_order(Engine(mock), requests)
    assert [one.cached_tokens for one in found] == [0, 12, 24, 36]
    assert sum(len(row.tokens) for step in mock.steps for row in step if row.length) == 48
    assert [one.token_ids for one in found] == tokens_alone(backend, requests)


prompts = st.builds(
    lambda text, length, tail: [*text[:length], *tail],
    st.sampled_from([TEXT, OTHER]),
    st.integers(0, 48),
    st.lists(st.integers(0, 15), min_size=1, max_size=6),
)


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.lists(prompts, max_size=5),
    st.lists(prompts, min_size=2, max_size=7),
    st.sampled_from([1, 4]),
)
def test_slots_that_are_taken_together(
    slots: int, before: Sequence[list[int]], together: Sequence[list[int]], chunk: int
) -> None:
    """Whatever they hold, and whichever goes on from, takes over or copies whichever."""

    def backend() -> MockBackend:
        return MockBackend(cached_logits, slots, 64, 1, chunk=chunk)

    engine = Engine(backend())
    for prompt in before:
        served(engine, [asked(prompt)])
    requests = [asked(prompt) for prompt in together]
    found = in_order(engine, requests)
    assert [one.token_ids for one in found] == tokens_alone(backend, requests)
