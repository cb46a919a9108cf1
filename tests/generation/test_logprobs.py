"""Log-probabilities: against transformers' logits (tests/fixtures/reference), and as plain data."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import (
    Completion,
    Engine,
    Logprobs,
    Request,
    logprobs,
    logprobs_of,
    prompt_logprobs_of,
)
from lite_runner.generation.logprobs import log_likelihoods
from tests import references
from tests.each import each
from tests.generation.mock import MockBackend, generated, hashed_logits

TOLERANCE = 1e-4
TOP = 5
CASES = [
    *((case, "native") for case in references.covering(references.every())),
    *((case, "online") for case in ("bloom", "qwen3")),
]
Reference = Callable[[str], Any]


@each(("case", "kind"), CASES)
def test_they_equal_transformers(case: str, kind: str, reference: Reference) -> None:
    """The forced tokens behind each prompt are scored, and the token that follows is drawn."""
    known = reference(case)
    model = getattr(known, kind)(2, known.length + 1)
    scored = None if known.config.prefix else TOP  # tokens of a prefix see those behind them
    options = GenerationConfig(max_new_tokens=1, logprobs=TOP, prompt_logprobs=scored)
    texts = [np.append(*pair) for pair in zip(known.prompts, known.forced, strict=True)]
    requests = [Request(text, options) for text in texts]
    made = Engine(model).generate(requests).completions
    steps = known.forced.shape[1]
    for text, completion, after, whole in zip(
        texts, made, known.logits, known.logits_no_cache, strict=True
    ):
        wanted = log_softmax(whole.astype(np.float64), axis=1)
        drawn = completion.logprobs
        assert completion.drawn == [wanted[-1].argmax()]
        assert np.abs(drawn.chosen - wanted[-1].max()).max() <= TOLERANCE
        assert_most_likely(drawn, wanted[-1:])
        if scored is None or not np.array_equal(after, whole):
            continue  # rotations depend on how long the text is: transformers' on that so far
        found = completion.prompt_logprobs
        assert len(found.chosen) == len(text) - 1
        behind = Logprobs(*(part[-steps:] for part in (found.chosen, found.top_ids, found.top)))
        forced = wanted[np.arange(steps), text[-steps:]]
        assert np.abs(behind.chosen - forced).max() <= TOLERANCE
        assert_most_likely(behind, wanted[:-1])


def assert_most_likely(found: Logprobs, wanted: np.ndarray) -> None:
    """Those found are the largest of `wanted` [n, vocab], the largest first."""
    assert found.top.shape == found.top_ids.shape == (len(wanted), TOP)
    assert np.abs(found.top - -np.sort(-wanted, axis=1)[:, :TOP]).max() <= TOLERANCE
    of_ids = np.take_along_axis(wanted, found.top_ids, axis=1)
    assert np.abs(found.top - of_ids).max() <= TOLERANCE


def test_a_drawn_text_has_the_same_as_a_prompt(reference: Reference) -> None:
    known = reference("llama")
    model = known.native(3, 64)
    options = GenerationConfig(max_new_tokens=9, logprobs=2, do_sample=True, temperature=2.0)
    requests = [Request(prompt, options) for prompt in known.prompts]
    made = Engine(model).generate(requests).completions
    again = GenerationConfig(max_new_tokens=1, prompt_logprobs=2)
    for prompt, completion in zip(known.prompts, made, strict=True):
        text = np.append(prompt, np.array(completion.drawn, np.int32))
        (scored,) = Engine(model).generate([Request(text, again)]).completions
        for name in ("chosen", "top_ids", "top"):
            behind = getattr(scored.prompt_logprobs, name)[len(prompt) - 1 :]
            assert np.array_equal(getattr(completion.logprobs, name), behind)


@pytest.mark.parametrize("budget", [None, 3])
def test_a_continuation_is_scored_behind_a_cached_prefix(
    reference: Reference, budget: int | None
) -> None:
    """The values are those of the whole text, to the bit."""
    known = reference("llama")
    shared, endings = known.prompts[0], known.forced[:2]
    texts = [np.append(shared, ending) for ending in endings]
    options = GenerationConfig(max_new_tokens=0, prompt_logprobs=1)
    whole = Engine(known.native(2, 64)).generate([Request(text, options) for text in texts])
    engine = Engine(known.native(2, 64), budget)
    behind = [Request(text, options, scored_from=len(shared)) for text in texts]
    first, second = (engine.generate([request]).completions[0] for request in behind)
    assert (first.cached_tokens, second.cached_tokens) == (0, len(shared) - 1)
    for found, wanted in zip((first, second), whole.completions, strict=True):
        for name in ("chosen", "top_ids", "top"):
            every = getattr(wanted.prompt_logprobs, name)
            assert np.array_equal(getattr(found.prompt_logprobs, name), every[len(shared) - 1 :])


def test_as_plain_data() -> None:
    found = Logprobs(
        np.array([-0.5, -np.inf]),
        np.array([[7], [8]], np.int32),
        np.array([[-0.5], [np.nan]]),
    )
    completion = Completion(0, 0, [7], "stop", end_token=2, logprobs=found, prompt_logprobs=found)
    listed = [
        {"token": 7, "logprob": -0.5, "top": [[7, -0.5]]},
        {"token": 2, "logprob": None, "top": [[8, None]]},
    ]
    assert logprobs_of(completion) == listed
    of_prompt = prompt_logprobs_of(completion, [1, 7, 2])
    assert of_prompt == [None, *listed]
    assert json.loads(json.dumps(of_prompt, allow_nan=False)) == of_prompt
    plain = Completion(0, 0, [7], "stop")
    assert logprobs_of(plain) is None and prompt_logprobs_of(plain, [1]) is None


def test_a_prompt_that_is_cut_short_has_what_was_computed() -> None:
    backend = MockBackend(hashed_logits, 1, 64, 0, chunk=1, budget=4, most_logits=4)
    options = GenerationConfig(max_new_tokens=3, logprobs=0, prompt_logprobs=1)
    steps = iter([False, False, True])
    prompt = [*range(12)]
    made = generated(backend, [prompt], options, interrupted=lambda: next(steps))
    (completion,) = made.completions
    assert made.interrupted and logprobs_of(completion) == []
    found = prompt_logprobs_of(completion, prompt)
    assert found is not None and [one and one["token"] for one in found] == [None, *range(1, 9)]


@given(
    count=st.integers(1, 20),
    vocab=st.integers(1, 300),
    scale=st.floats(0, 1e4),
    shift=st.floats(-1e4, 1e4),
    block=st.integers(1, 4000),
    seed=st.integers(0, 99),
)
def test_equals_scipy(
    count: int, vocab: int, scale: float, shift: float, block: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((count, vocab)) * scale + shift).astype(np.float32)
    following = random.integers(0, vocab, count).astype(np.int32)
    before, top = logits.copy(), min(vocab, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "BLOCK_BYTES", block)
        found, ids, best = log_likelihoods(logits, following, top)
    every = log_softmax(logits.astype(np.float64), axis=1)
    wanted = every[np.arange(count), following]
    assert found.dtype == np.float64 and np.array_equal(logits, before)
    # float32 differences of logits are exact to their last bit; sums to far more.
    assert np.allclose(found, wanted, rtol=2e-7, atol=1e-6)
    assert ids.dtype == np.int32 and best.dtype == np.float64
    assert np.array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :top])
    assert np.allclose(best, np.take_along_axis(every, ids, axis=1), rtol=2e-7, atol=1e-6)


def test_the_most_likely_are_only_found_where_they_are_asked_for() -> None:
    logits = np.array([[1, 3, 2]], np.float32)
    found, ids, best = log_likelihoods(logits, np.array([2], np.int32))
    assert (ids.shape, best.shape) == ((1, 0), (1, 0))
    chosen, ids, best = log_likelihoods(logits, np.array([2], np.int32), 7)
    assert chosen == found == best[0, 1]
    assert ids.tolist() == [[1, 2, 0]]  # no more than there are


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_no_number(bad: float) -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[1, 2] = bad
    found, _, best = log_likelihoods(logits, np.zeros(3, np.int32), 1)
    assert np.isnan(found[1]) and np.isnan(best[1])
    assert np.allclose(found[[0, 2]], -np.log(5))


def test_what_cannot_come_is_minus_infinity() -> None:
    logits = np.array([[0, -np.inf, 0]], np.float32)
    with np.errstate(all="raise"):
        assert log_likelihoods(logits, np.array([0], np.int32))[0][0] == pytest.approx(-np.log(2))
    assert log_likelihoods(logits, np.array([1], np.int32))[0][0] == -np.inf
