"""Requests that come and go at random, and an engine that is watched while it serves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lite_runner.backends import Row
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Completion, Engine, Finished, Request
from lite_runner.generation.decoding import SequenceGroup
from tests.generation.mock import Logits, MockBackend, cached_logits

LENGTH, MOST_NEW, EOS = 64, 6, (3, 9)
# What prompts begin with, so that they share prefixes: the second parts from the first late.
STEMS = np.random.default_rng(1).integers(0, 16, (3, 48)).astype(np.int32)
STEMS[1, :20] = STEMS[0, :20]


@dataclass(frozen=True)
class Scenario:
    """A scenario; times are numbers of steps."""

    info: Mapping[str, Any]  # of the mock; its memory is no more than some sequences need
    window: int | None  # that some of its layers see, if it has memory
    budget: int  # above the least
    prefix_cache: bool
    speculate: bool
    requests: tuple[tuple[int, Request], ...]  # each with when it is added
    cancels: tuple[tuple[int, int, int | None], ...]  # when, which request, which sequence of it

    def backend(self, logits: Logits) -> MockBackend:
        window = None if self.window is None else (self.window, self.least + self.budget)
        return MockBackend(logits, max_length=LENGTH, window=window, **self.info)

    @property
    def least(self) -> int:
        """Of the token budget."""
        return self.info["slots"] - 1 + self.info["chunk"]


@st.composite
def scenarios(draw: st.DrawFn, requests: int = 9) -> Scenario:
    chunk = draw(st.sampled_from([1, 1, 1, 4, 8]))
    info = {
        "slots": draw(st.integers(1, 6)),
        "adapter_slots": draw(st.integers(1, 3)),
        "chunk": chunk,
        "most_logits": draw(st.sampled_from([chunk, 16, 0])),
        "can_copy": draw(st.sampled_from([True, True, True, False])),
        "can_continue": draw(st.sampled_from([True, True, True, False])),
        "short_length": draw(st.sampled_from([None, None, 9, 25, 50])),
    }
    if draw(st.booleans()):
        block = draw(st.sampled_from([4, 8, 16]))
        widest = min(3, info["slots"]) if info["can_copy"] else 1
        most = widest * LENGTH // block
        info["memory"] = (block, most + draw(st.integers(0, most)))
    moments = st.integers(0, 14)
    asked = draw(st.lists(st.tuples(moments, _requests(info)), min_size=1, max_size=requests))
    numbered = [(when, replace(one, seed_key=(7, i))) for i, (when, one) in enumerate(asked)]
    which = st.integers(0, len(asked) - 1)
    index = st.sampled_from([None, None, 0, 1, 2])
    return Scenario(
        info,
        draw(st.sampled_from([None, 1, 5, 9, 20])),
        draw(st.sampled_from([0, 0, 1, 3, 17, 100])),
        draw(st.sampled_from([True, True, True, False])),
        draw(st.booleans()),
        tuple(sorted(numbered, key=lambda one: one[0])),
        tuple(draw(st.lists(st.tuples(st.integers(0, 20), which, index), max_size=5))),
    )


def _requests(info: Mapping[str, Any]) -> st.SearchStrategy[Request]:
    widest = info["slots"] if info["can_copy"] else 1
    if "memory" in info:
        widest = min(3, widest)
    some = st.sampled_from([None, None, 0, 2])
    options = st.builds(
        GenerationConfig,
        max_new_tokens=st.integers(0, MOST_NEW),
        do_sample=st.booleans(),
        num_return_sequences=st.sampled_from([1, 1, 1, 2, 3] if info["can_copy"] else [1]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        eos_token_id=st.sampled_from([(), EOS]),
        logprobs=some,
        prompt_logprobs=some if info["most_logits"] else st.none(),
    )
    beams = st.builds(
        lambda width, new: GenerationConfig(
            num_beams=width, num_return_sequences=2, max_new_tokens=new, eos_token_id=EOS
        ),
        st.integers(2, max(2, widest)),
        st.integers(1, MOST_NEW),
    )
    return st.builds(
        Request,
        st.builds(
            _prompt, st.integers(0, 2), st.integers(0, 48), st.lists(st.integers(0, 15), max_size=9)
        ),
        st.one_of(options, options, options, beams) if widest > 1 else options,
        st.sampled_from([None, None, "a", "b", "c", "d"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )


def _prompt(stem: int, length: int, tail: Sequence[int]) -> NDArray[np.int32]:
    return np.array([*STEMS[stem, :length], *tail] or [5], np.int32)


class Run:
    """A scenario from its first step to its last, with the results of each request.

    After every step it is checked who has a slot, who was given one, and what was computed.
    """

    def __init__(
        self,
        scenario: Scenario,
        logits: Logits = cached_logits,
        watch: Callable[[Sequence[Row]], None] = lambda rows: None,
    ) -> None:
        self.scenario = scenario
        self.backend = scenario.backend(logits)
        self.budget = scenario.least + scenario.budget
        self.engine = Engine(
            self.backend,
            self.budget,
            prefix_cache=scenario.prefix_cache,
            speculate=scenario.speculate,
        )
        self.requests: dict[int, Request] = {}  # by the scheduler's number
        self.cancelled: set[tuple[int, int]] = set()  # sequences, by number and index
        self.tokens: dict[tuple[int, int], list[int]] = {}  # reported, without eos
        self.completions: dict[tuple[int, int], Completion] = {}
        self.errors: dict[tuple[int, int], Exception | None] = {}
        self.computed: Counter[tuple[int, int]] = Counter()  # tokens of prompts, by request, part
        self.forward, self.backend.forward = self.backend.forward, self._watched  # type: ignore[method-assign]
        self._watch = watch

    def go(self) -> Run:
        """All of it. The number of steps is bounded: while there is work, a step does some."""
        todo, cancels = list(self.scenario.requests), list(self.scenario.cancels)
        ids: list[int] = []
        again = 4 if "memory" in self.scenario.info else 1  # those that make room for others
        for now in range(21 + again * sum(map(_most_steps, todo))):
            while todo and todo[0][0] <= now:
                request = todo.pop(0)[1]
                ids.append(self.engine.add(request))
                self.requests[ids[-1]] = request
            for when, which, index in cancels:
                if when == now and which < len(ids):
                    self.cancel(ids[which], index)
            if self.engine.idle and not todo:
                break
            self.step()
        assert self.engine.idle and not todo
        assert not any(self.backend.adapters.pins.values())
        assert self.engine.step() == []
        return self

    def cancel(self, id: int, index: int | None) -> None:
        for event in self.engine.finish(id, index=index):
            assert event.id == id and index in (None, event.completion.return_index)
            self.cancelled.add((id, event.completion.return_index))
            self._finished(event)
        self.check_slots()

    def step(self) -> None:
        line, expected = list(self.engine.scheduler._waiting), [*self._first_in_line()]
        events = self.engine.step()
        admitted = [job for job in line if job not in self.engine.scheduler._waiting]
        assert admitted == expected or "memory" in self.scenario.info
        self.check_slots()
        for event in events:
            if isinstance(event, Finished):
                self._finished(event)
                continue
            key = event.id, event.index
            assert key not in self.completions
            self.tokens.setdefault(key, []).extend([] if event.is_end else [event.token])

    def check_slots(self) -> None:
        """No slot is two requests', and an adapter is pinned as often as requests with it run."""
        scheduler = self.engine.scheduler
        jobs, line = scheduler._running, scheduler._waiting
        slots = [slot for job in jobs for slot in job.slots_in_use()]
        assert len(set(slots)) == len(slots) and all(job.strategy.running() for job in jobs)
        assert line == sorted(line, key=lambda job: job.order)
        jobs = [*jobs, *(job for job in line if job.preempted)]
        pins = Counter(job.request.adapter for job in jobs if job.request.adapter)
        assert pins == Counter(self.backend.adapters.pins)

    def _first_in_line(self) -> Iterator[SequenceGroup]:
        """Those who are to have slots in the next step: first come first served, but that the base
        model overtakes those who wait for an adapter's slot."""
        jobs, info = self.engine.scheduler._running, self.scenario.info
        free = info["slots"] - sum(len(job.slots_in_use()) for job in jobs)
        adapters = {job.request.adapter for job in jobs} - {None}
        overtaking = False
        for job in self.engine.scheduler._waiting:
            if job.strategy.width > free:
                return
            name = job.request.adapter
            if name is not None and (overtaking or len(adapters | {name}) > info["adapter_slots"]):
                overtaking = True
                continue
            adapters |= {name} - {None}
            free -= job.strategy.width
            yield job

    def _watched(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Every sequence has its token, and prompts have the rest of the budget, in their order."""
        jobs = self.engine.scheduler._running
        owners = {slot: job for job in jobs for slot in job.slots_in_use()}
        decoded = {row.slot for row in rows if not row.length}
        assert decoded == {slot for slot, job in owners.items() if job.decoding}
        pieces = {owners[row.slot].order: row for row in rows if row.length}
        assert len(pieces) == len(rows) - len(decoded)
        waiting = [job for job in jobs if not job.decoding and job.source is None]
        assert list(pieces) == [job.order for job in waiting][: len(pieces)]
        assert bool(pieces) == bool(waiting)
        room = self.budget - sum(len(row.tokens) for row in rows)
        assert room >= 0
        chunk = self.scenario.info["chunk"]
        for job in waiting:
            row = pieces.get(job.order)
            whole = row is not None and row.position + len(row.tokens) == row.length
            scored = job.scored is not None
            assert whole or scored or room < chunk
            if scored and not whole:
                break  # those behind wait for it
            if row is not None:
                assert row.position % chunk == 0
                assert whole or (row.position + len(row.tokens)) % chunk == 0
        self._watch(rows)
        logits = self.forward(rows)
        for job in waiting:
            row = pieces.get(job.order)
            if row is not None and not job.begun:
                self.computed[job.id, job.order[2]] += len(row.tokens)
        return logits

    def _finished(self, event: Finished) -> None:
        key = event.id, event.completion.return_index
        assert key not in self.completions and event.completion.prompt_index == event.id
        self.completions[key], self.errors[key] = event.completion, event.error


def _most_steps(asked: tuple[int, Request]) -> int:
    """Steps that a request may need while no other moves: each does a piece of a prompt or a token
    of every sequence. It has as many parts as sequences at most; texts may be prefilled again."""
    options, most = asked[1].options, 2 * (len(asked[1].prompt) + MOST_NEW + 1)
    return options.num_return_sequences * max(1, options.num_beams) * most


def alone(scenario: Scenario, request: Request, logits: Logits = cached_logits) -> Run:
    """The request by itself, on a fresh backend."""
    single = replace(scenario, requests=((0, request),), cancels=(), prefix_cache=False, budget=100)
    single = replace(single, speculate=False, info={**scenario.info, "memory": None})
    return Run(single, logits).go()


def same(got: Completion, expected: Completion) -> bool:
    """To the bit."""
    facts = ("token_ids", "finish_reason", "end_token", "score", "return_index")
    return all(getattr(got, name) == getattr(expected, name) for name in facts) and all(
        _bits(getattr(got, name)) == _bits(getattr(expected, name))
        for name in ("logprobs", "prompt_logprobs")
    )


def begins(got: Completion, expected: Completion) -> bool:
    """True if a partial completion is a prefix of another, with its numbers."""
    count = len(got.token_ids)
    if got.token_ids != expected.token_ids[:count] or got.end_token is not None:
        return False
    if got.logprobs is None or expected.logprobs is None:
        return got.logprobs is expected.logprobs
    return bool(
        len(got.logprobs.chosen) == count
        and np.array_equal(got.logprobs.chosen, expected.logprobs.chosen[:count])
    )


def _bits(logprobs: Any) -> Any:
    if logprobs is None:
        return None
    return [one.tobytes() for one in (logprobs.chosen, logprobs.top_ids, logprobs.top)]
