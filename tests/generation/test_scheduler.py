"""Invariants of the scheduler, for requests of any kind that come and go at any time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lite_runner.errors import ConfigError
from lite_runner.generation import Engine, Finished
from lite_runner.generation.request import Adjustments, Event
from tests.generation.mock import Logits, MockBackend, asked, cached_logits, served, tokens_alone
from tests.generation.scenarios import Run, Scenario, alone, begins, same, scenarios


@pytest.fixture(autouse=True, scope="module")
def short_prompts_are_copied() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lite_runner.generation.slots._SHORTEST_COPY", 4)
        yield


def check_texts(run: Run, logits: Logits = cached_logits) -> None:
    """Each is what it is alone, to the bit; what was cancelled, as far as it is. What was not
    computed of a prompt is what was in the cache."""
    for id, request in run.requests.items():
        wanted = alone(run.scenario, request, logits).completions
        options = request.options
        for index in range(options.num_return_sequences):
            # Of beams that were cancelled at once there is a single one.
            if (got := run.completions.get((id, index))) is None:
                assert options.num_beams > 1 and (id, 0) in run.cancelled
                continue
            if options.num_beams == 1:
                assert run.tokens.get((id, index), []) == got.token_ids
            if (id, index) in run.cancelled:
                assert got.finish_reason == "interrupted"
                assert options.num_beams > 1 or begins(got, wanted[0, index])
                continue
            assert same(got, wanted[0, index])
            if "memory" in run.scenario.info:
                continue  # some of it may have been computed twice
            part = index // run.scenario.info["slots"] if options.num_beams == 1 else 0
            assert got.cached_tokens == len(request.prompt) - run.computed[id, part]


@settings(max_examples=80)
@given(scenarios())
def test_requests_that_come_and_go(scenario: Scenario) -> None:
    check_texts(Run(scenario).go())


@settings(max_examples=40)
@given(scenarios())
def test_the_same_order_gives_the_same_rows(scenario: Scenario) -> None:
    first, second = Run(scenario).go(), Run(scenario).go()
    assert rows_of(first) == rows_of(second)
    assert first.backend.copies == second.backend.copies


def rows_of(run: Run) -> list[list[tuple[Any, ...]]]:
    return [
        [
            (row.slot, row.tokens.tolist(), row.position, row.adapter_slot, row.logits, row.length)
            for row in step
        ]
        for step in run.backend.steps
    ]


@settings(max_examples=60)
@given(
    scenarios(),
    st.sets(st.integers(0, 40), max_size=15),
    st.sampled_from([RuntimeError, KeyboardInterrupt]),
    st.booleans(),
)
def test_a_step_that_fails_is_done_again(
    scenario: Scenario, failing: set[int], error: type[BaseException], after: bool
) -> None:
    """Before a call of the backend, or after its forward, when its cache is already written."""
    run = Run(scenario)
    calls = itertools.count()

    def broken(call: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            fails = next(calls) in failing
            if fails and not after:
                raise error
            result = call(*arguments)
            if fails:
                raise error
            return result

        return called

    step = run.engine.step

    def again() -> list[Event]:
        while True:
            with contextlib.suppress(error):
                return step()
            run.check_slots()

    run.forward = broken(run.forward, after)
    run.backend.copy = broken(run.backend.copy, False)  # type: ignore[method-assign]
    run.engine.step = again  # type: ignore[method-assign]
    check_texts(run.go())
    assert len(run.backend.steps) <= 300


@settings(max_examples=40)
@given(scenarios(), st.integers(1, 60))
def test_numbers_that_are_none_end_one_request(scenario: Scenario, length: int) -> None:
    """Those of an adapter that gives NaN after so many tokens."""

    def logits(history: list[int], adapter: int) -> NDArray[np.float32]:
        found = cached_logits(history, adapter)
        return np.full_like(found, np.nan) if adapter == 1 and len(history) >= length else found

    run = Run(scenario, logits).go()
    check_texts(run, logits)
    for key, completion in run.completions.items():
        failed = completion.finish_reason == "error"
        assert (run.errors[key] is not None) == failed
        assert not failed or run.requests[key[0]].adapter == "a"
        if failed:
            assert len(run.requests[key[0]].prompt) + len(completion.token_ids) >= length


TEXT = np.random.default_rng(2).integers(0, 16, 40).tolist()


def test_running_prompts_do_not_wait_for_later_ones(backend: Callable[..., Any]) -> None:
    """Those in between would overtake."""
    engine = Engine(backend(slots=4), 8)
    engine.add(asked(TEXT, priority=1))
    engine.step()
    first = engine.add(asked([*TEXT[:30], 1], priority=0))
    engine.step()
    engine.add(asked(TEXT[::-1], priority=0))
    order = list(served(engine))
    assert order[0] == first


def test_a_sequence_that_is_cancelled_early_frees_its_slot(backend: Callable[..., Any]) -> None:
    mock = backend(slots=3)
    engine = Engine(mock, 6)
    several = engine.add(asked(TEXT, options={"num_return_sequences": 3, "do_sample": True}))
    engine.step()
    engine.add(asked([4], priority=-1))
    assert len(engine.finish(several, index=0)) == 1
    engine.step()
    assert engine.scheduler.waiting == 1  # the prompt is computed in the first slot
    assert len(engine.finish(several, index=2)) == 1
    engine.step()
    assert engine.scheduler.waiting == 0
    engine.add(asked([5, 6], priority=-1, new=20))
    assert set(served(engine)) == {0, 1, 2}


def test_a_slot_that_was_left_early_is_the_next_ones(backend: Callable[..., Any]) -> None:
    """A request that is over says nothing of a slot that another has had since."""
    engine = Engine(backend(slots=2), 6)
    pair = engine.add(asked([3], 6, options={"num_return_sequences": 2, "do_sample": True}))
    engine.step()
    engine.finish(pair, index=0)
    long = engine.add(asked(TEXT))
    engine.step()
    engine.finish(pair)
    again = engine.add(asked(TEXT))
    found = served(engine)
    assert [found[id].cached_tokens for id in (long, again)] == [0, len(TEXT) - 1]


def test_a_copied_beginning_is_its_own_requests(backend: Callable[..., Any]) -> None:
    """Not that of one which had the slot before, and still runs in others."""
    mock = backend(slots=4)
    engine = Engine(mock, 6)
    sampled = {"num_return_sequences": 2, "do_sample": True}
    pair = engine.add(asked([7] * 20, 40, options=sampled, priority=9))
    while not engine.step():
        pass
    engine.finish(pair, index=0)
    for _ in range(3):
        engine.add(asked(TEXT))
    while len(mock.copies) < 2:
        engine.step()
    last = asked([7] * 20, priority=-1)
    engine.finish(1)
    id = engine.add(last)
    assert [served(engine)[id].token_ids] == tokens_alone(backend, [last])


def test_a_request_cancelled_while_queued_had_nothing_cached(backend: Callable[..., Any]) -> None:
    engine = Engine(backend(slots=3), 8)
    engine.add(asked(TEXT))
    waits = engine.add(asked(TEXT))
    engine.step()
    (event,) = engine.finish(waits)
    assert event.completion.cached_tokens == 0


def test_an_end_is_reported_although_the_step_failed(backend: Callable[..., Any]) -> None:
    mock = backend(slots=3)
    engine = Engine(mock)
    engine.add(asked([1], adapter="b"))
    other = engine.add(asked([1]))
    del mock.adapters.known["b"]
    forward = mock.forward

    def fails(rows: Any) -> Any:
        raise RuntimeError

    mock.forward = fails
    with pytest.raises(RuntimeError):
        engine.step()
    mock.forward = forward
    events = engine.step()
    assert isinstance(events[0], Finished) and events[0].completion.finish_reason == "error"
    assert [event.id for event in events] == [0, other]


def test_unreported_events_are_reported_at_the_end(backend: Callable[..., Any]) -> None:
    mock = backend(slots=3)
    engine = Engine(mock)
    gone = engine.add(asked([1], adapter="b"))
    engine.add(asked([1]))
    del mock.adapters.known["b"]
    mock.forward, forward = None, mock.forward
    with pytest.raises(TypeError):
        engine.step()
    mock.forward = forward
    (event,) = engine.finish(gone)
    assert event.completion.finish_reason == "error" and event.error is not None
    assert all(event.id != gone for event in engine.step())


@pytest.mark.parametrize("token", [-1, 16])
def test_a_token_that_is_none_is_refused(backend: Callable[..., Any], token: int) -> None:
    with pytest.raises(ConfigError, match=rf"request: got token {token}, expected 0 to 15"):
        Engine(backend()).add(asked([1, token]))


@pytest.mark.parametrize("scored", [False, True])
def test_prompts_beside_decoding_are_chunked_by_their_time(
    backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, scored: bool
) -> None:
    clock, token_s = [0.0], 0.0025 if scored else 0.001
    monkeypatch.setattr("lite_runner.generation.scheduler.time.perf_counter", lambda: clock[0])
    mock = backend(slots=2, max_length=2000, most_logits=512)
    forward = mock.forward

    def forward_for_a_while(rows: Any) -> Any:
        clock[0] += token_s * sum(len(row.tokens) for row in rows)
        return forward(rows)

    mock.forward = forward_for_a_while
    engine = Engine(mock, step_s=0.1)
    options = {"prompt_logprobs": 1} if scored else {}
    long = asked([index % 16 for index in range(1200)], options=options)
    requests = [asked([1, 2], new=40), long]
    engine.add(requests[0])
    engine.step()
    found = served(engine, [long])
    prompts = [len(rows[-1].tokens) for rows in mock.steps[1:] if len(rows[-1].tokens) > 1]
    assert prompts[0] == 64 and max(prompts[:-1]) <= (64 if scored else 100)
    assert min(prompts[:-1]) >= 16
    alone = [served(Engine(backend(slots=2, max_length=2000)), [one])[0] for one in requests]
    assert [found[0].token_ids, found[1].token_ids] == [one.token_ids for one in alone]


class Another:
    """A grammar of texts in which no token follows itself."""

    token = -1

    def mask(self, scores: NDArray[np.floating[Any]]) -> None:
        if self.token >= 0:
            scores[self.token] = -np.inf

    def take(self, token: int) -> None:
        self.token = token


def test_the_youngest_makes_room_and_comes_again(backend: Callable[..., Any]) -> None:
    """Whatever it draws, it draws the same."""
    options = {"do_sample": True, "temperature": 2.0, "repetition_penalty": 1.3}
    guided = Adjustments(guide=Another)
    requests = [
        asked(TEXT[start : start + 8], 24, options=options, seed_key=(1, start), adjustments=guided)
        for start in range(4)
    ]
    mock = backend(memory=(4, 16))
    engine = Engine(mock)
    found = served(engine, requests)
    assert engine.scheduler.timing.preemptions > 0
    assert [found[id].token_ids for id in range(4)] == tokens_alone(backend, requests)
    assert list(found) == sorted(found)  # the oldest stays
    assert max(len(step) for step in mock.steps) > 1


def test_preempted_requests_can_be_cancelled_or_fail(backend: Callable[..., Any]) -> None:
    for fails in (False, True):
        mock = backend(memory=(4, 16))
        engine = Engine(mock)
        first, second = (engine.add(asked(TEXT[:20], 40, adapter=name)) for name in ("a", "b"))
        while not engine.scheduler.timing.preemptions:
            engine.step()
        assert (engine.scheduler.running, engine.scheduler.waiting) == (1, 1)
        assert mock.adapters.pins == {"a": 1, "b": 1}  # it must not be replaced meanwhile
        if fails:
            del mock.adapters.known["b"]
            found = served(engine)
            assert found.pop(second).finish_reason == "error"
        else:
            (ended,) = engine.finish(second)
            assert ended.completion.token_ids
            found = served(engine)
        assert list(found) == [first] and mock.adapters.pins == {"a": 0, "b": 0}


def test_an_unused_cache_is_freed_first(backend: Callable[..., Any]) -> None:
    mock = backend(memory=(4, 20))
    engine = Engine(mock)
    served(engine, [asked(TEXT[:30])])
    served(engine, [asked(TEXT[::-1])])
    assert engine.scheduler.timing.preemptions == 0 and mock.pool.free >= 0
    (again,) = served(engine, [asked(TEXT[::-1])]).values()
    assert again.cached_tokens == len(TEXT) - 1


def test_a_prefix_is_reused_as_far_as_windows_have_their_blocks(
    backend: Callable[..., Any],
) -> None:
    def make() -> MockBackend:
        return backend(slots=2, memory=(4, 40), window=(6, 8), budget=8)

    mock = make()
    engine = Engine(mock, 8)
    windows = mock.info.windows
    assert windows is not None and windows.blocks == 2 * 4 < mock.pool.blocks
    texts = [TEXT, [*TEXT, *TEXT[:9]], TEXT[::-1], [*TEXT[:20], 3, 4], [*TEXT[::-1], 5]]
    requests = [asked(text) for text in texts]
    found = [served(engine, [request]).popitem()[1] for request in requests]
    # The fourth text's prefix is there, but not what its next token sees of it.
    assert [one.cached_tokens for one in found] == [0, 40, 0, 0, 40]
    assert [one.token_ids for one in found] == tokens_alone(backend, requests)
    # Beside each other, the second while the first one's prompt is computed.
    engine = Engine(make(), 20)  # more than can be repeated
    both = served(engine, [asked([*TEXT[:30], 1]), asked([*TEXT[:30], 2])])
    assert [one.cached_tokens for one in both.values()] == [0, 30]
    engine.add(asked(TEXT))
    engine.step()  # 30 tokens from the cache, and 8
    assert engine.scheduler.cache_usage == (10 + 4) / (32 + 8)


def test_beams_that_memory_never_suffices_for_are_refused(backend: Callable[..., Any]) -> None:
    engine = Engine(backend(memory=(4, 16)))
    with pytest.raises(ConfigError, match="3 beams of up to 40 tokens, but there is memory for 64"):
        engine.add(asked(TEXT[:20], 20, options={"num_beams": 3}))
    assert len(served(engine, [asked(TEXT[:20], 20, options={"num_return_sequences": 3})])) == 1


def test_texts_that_cannot_be_computed_again_have_all_memory_at_once(
    backend: Callable[..., Any],
) -> None:
    """Their keys would be others than those of their first tokens."""
    engine = Engine(backend(memory=(4, 16), can_continue=False))
    requests = [asked(TEXT[start : start + 8], 24) for start in range(3)]
    found = served(engine, requests)
    assert engine.scheduler.timing.preemptions == 0
    assert [found[id].token_ids for id in range(3)] == tokens_alone(
        lambda: backend(can_continue=False), requests
    )
