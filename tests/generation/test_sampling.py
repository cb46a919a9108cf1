"""Sampling and log-probabilities: as transformers and SciPy have them, and drawn reproducibly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import RunnerError
from lite_runner.generation import (
    Completion,
    Engine,
    Logprobs,
    Request,
    logprobs_of,
    prompt_logprobs_of,
    sampling,
)
from lite_runner.generation.request import Adjustments
from lite_runner.generation.sampling import (
    Sampler,
    TopK,
    candidates,
    log_likelihoods,
    process_logits,
)
from tests import references
from tests.each import each
from tests.generation.mock import MockBackend, generated, hashed_logits

CASES = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "generation" / "sampling.json").read_text()
)
PROMPT = np.array([1, 2], dtype=np.int32)


def probabilities(
    logits: np.ndarray, config: GenerationConfig, seen: list[int] | None = None, generated: int = 0
) -> np.ndarray:
    scores = process_logits(logits, np.array(seen or [], dtype=np.int32), generated, config)
    ids, weights = candidates(scores, config)
    result = np.zeros(len(logits))
    result[slice(None) if ids is None else ids] = weights
    return result / result.sum()


def test_same_distribution_as_transformers(subtests: pytest.Subtests) -> None:
    for number, case in enumerate(CASES):
        with subtests.test(number=number):
            config = GenerationConfig(
                do_sample=True, eos_token_id=tuple(case["eos"]), **case["options"]
            )
            logits = np.array(case["logits"], dtype=np.float32)
            ours = probabilities(logits, config, case["seen"], case["generated"])
            theirs = np.array(case["probabilities"])
            # Of equally likely tokens at the edge of a nucleus either may be kept.
            np.testing.assert_allclose(np.sort(ours), np.sort(theirs), atol=2e-6)
            scores = process_logits(logits, np.array(case["seen"]), case["generated"], config)
            different = np.flatnonzero(np.abs(ours - theirs) > 2e-6)
            assert len(np.unique(scores[different])) <= 1


def test_repetition_penalty_leaves_pad_and_the_input_alone() -> None:
    logits = np.array([2.0, -2.0, 4.0, 1.0], dtype=np.float32)
    config = GenerationConfig(repetition_penalty=2.0, pad_token_id=2)
    scores = process_logits(logits, np.array([0, 0, 1, 2]), 0, config)
    assert scores.tolist() == [1.0, -4.0, 4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, 1.0]


def test_repetition_penalty_sees_prompt_and_generated_tokens() -> None:
    config = GenerationConfig(repetition_penalty=10.0)
    sampler = Sampler(config, np.array([3], dtype=np.int32), [0])
    logits = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
    assert [sampler.choose(logits) for _ in range(4)] == [2, 1, 0, 3]


class NoThree:
    """A guide that refuses token 3, and notes the chosen tokens."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self, scores: np.ndarray) -> None:
        scores[3] = -np.inf

    def take(self, token: int) -> None:
        self.taken.append(token)


def test_penalties_of_what_was_generated_biases_and_a_guide() -> None:
    guide = NoThree()
    options = GenerationConfig(presence_penalty=1.0, frequency_penalty=0.5)
    adjustments = Adjustments(logit_bias=((0, 2.0),), guide=lambda: guide)
    prompt = np.array([0], dtype=np.int32)  # which is not penalized
    sampler = Sampler(options, prompt, [0], "", adjustments, keep_scores=True)
    logits = np.array([1.0, 2.75, 0.0, 9.0], dtype=np.float32)
    chosen, scores = [], []
    for _ in range(4):
        chosen.append(sampler.choose(logits))
        scores.append(sampler.scores.tolist())
    assert chosen == guide.taken == [0, 1, 0, 1]
    assert scores == [
        [3.0, 2.75, 0.0, -np.inf],
        [1.5, 2.75, 0.0, -np.inf],
        [1.5, 1.25, 0.0, -np.inf],
        [1.0, 1.25, 0.0, -np.inf],
    ]


def test_penalties_need_no_other_adjustment() -> None:
    logits = np.array([3.0, 2.75, 1.0], dtype=np.float32)
    for options, expected in (
        ({"presence_penalty": 2.0}, [0, 1, 0, 0]),
        ({"frequency_penalty": 1.0}, [0, 1, 0, 1]),
        ({"frequency_penalty": -1.0}, [0, 0, 0, 0]),
        ({}, [0, 0, 0, 0]),
    ):
        sampler = Sampler(GenerationConfig(**options), PROMPT, [0])
        assert [sampler.choose(logits) for _ in range(4)] == expected


def test_min_new_tokens_masks_every_eos() -> None:
    config = GenerationConfig(min_new_tokens=2, eos_token_id=(0, 1))
    sampler = Sampler(config, PROMPT, [0])
    logits = np.array([5.0, 4.0, 3.0], dtype=np.float32)
    assert [sampler.choose(logits) for _ in range(3)] == [2, 2, 0]


def test_nothing_to_do_copies_nothing() -> None:
    logits = np.zeros(4, dtype=np.float32)
    assert process_logits(logits, PROMPT, 0, GenerationConfig()) is logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    """Chi-square over 20,000 draws, with a fixed seed."""
    config = GenerationConfig(do_sample=True, seed=3, **options)
    logits = np.random.default_rng(0).normal(scale=1.5, size=16).astype(np.float32)
    draws = 20_000
    tokens = [Sampler(config, PROMPT, [0, index, 0]).choose(logits) for index in range(draws)]
    expected = probabilities(logits, config, PROMPT.tolist()) * draws
    counts = np.bincount(tokens, minlength=16)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    # Far beyond the 99.99 % quantile (about freedom + 4 sqrt(2 freedom) + 10).
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 10


def test_successive_draws_of_one_sequence_follow_the_distribution() -> None:
    sampler = Sampler(GenerationConfig(do_sample=True), PROMPT, [0, 0, 0])
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    counts = np.bincount([sampler.choose(logits) for _ in range(20_000)], minlength=4)
    np.testing.assert_allclose(counts / 20_000, [0.5, 0.25, 0.125, 0.125], atol=0.02)


def test_seed_prompt_and_return_index_each_give_their_own_draws() -> None:
    logits = np.zeros(50_000, dtype=np.float32)

    def tokens(seed: int, prompt: int, ret: int) -> list[int]:
        sampler = Sampler(GenerationConfig(do_sample=True), PROMPT, [seed, prompt, ret])
        return [sampler.choose(logits) for _ in range(3)]

    assert tokens(0, 0, 0) == tokens(0, 0, 0)
    drawn = [tokens(0, 0, 0), tokens(1, 0, 0), tokens(0, 1, 0), tokens(0, 0, 1), tokens(0, 1, 1)]
    assert len({tuple(row) for row in drawn}) == len(drawn)


@each("spread", [0.0, 0.001, 1.0, 8.0])
@each("top_p", [0.05, 0.6, 0.999])
def test_a_large_nucleus_is_exact(spread: float, top_p: float) -> None:
    """However much of the vocabulary it takes, also where all tokens are alike."""
    logits = np.random.default_rng(5).normal(scale=spread, size=30_000).astype(np.float32)
    kept = np.sort(probabilities(logits, GenerationConfig(top_p=top_p)))[::-1]
    weights = np.sort(np.exp(logits.astype(np.float64) - logits.max()))[::-1]
    weights /= weights.sum()
    count = int((weights.cumsum() < top_p).sum()) + 1
    assert abs(np.count_nonzero(kept) - count) <= 1  # the edge is a matter of rounding
    np.testing.assert_allclose(kept[:count].sum(), 1.0, atol=1e-3)


@each("vocab", [1000, 1024, 5000, 49_152])
@each("top_k", [1, 50, 999, 3000])
@each("step", [0.0, 0.5])
def test_top_k_keeps_the_largest_and_their_equals(vocab: int, top_k: int, step: float) -> None:
    """Of any vocabulary, also where many are equal, few far ahead or most masked."""
    random = np.random.default_rng(vocab + top_k)
    logits = random.normal(scale=2, size=vocab).astype(np.float32)
    if step:
        logits = np.round(logits / np.float32(step)) * np.float32(step)
    ahead, few = logits.copy(), logits.copy()
    ahead[:3], few[10:] = 30.0, -np.inf
    for row in (logits, ahead, few):
        ids, weights = candidates(row, GenerationConfig(top_k=top_k))
        if top_k >= vocab:
            assert ids is None
            continue
        assert ids is not None
        np.testing.assert_array_equal(ids, np.flatnonzero(row >= np.sort(row)[-top_k]))
        np.testing.assert_array_equal(weights, np.exp(row[ids] - row.max()))


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    st.floats(1e-3, 10),
    st.integers(0, 50),
    st.floats(0.001, 1.0),
    st.floats(0.0, 1.0),
)
def test_a_token_is_always_found_and_allowed(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    row = np.array(logits, dtype=np.float32)
    token = Sampler(config, PROMPT[:0], [0]).choose(row)
    assert probabilities(row, config)[token] > 0
    # Of logits whose weights are the same number any may be left out.
    alike = np.exp((row - row.max()) / np.float32(temperature)) == 1.0
    assert probabilities(row, config)[alike].any()


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = np.array([3e38, -3e38, 2.9e38], dtype=np.float32)
    config = GenerationConfig(do_sample=True, temperature=1e-30)
    assert Sampler(config, PROMPT, [0]).choose(logits) == 0


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "logits, what",
    [
        ([1.0, np.nan, 2.0], "NaN"),
        ([-np.inf] * 3, "no finite value"),
        ([1.0, np.inf, 2.0], "no finite value"),
    ],
)
def test_unusable_logits_name_step_and_prompt(
    do_sample: bool, logits: list[float], what: str
) -> None:
    sampler = Sampler(GenerationConfig(do_sample=do_sample), PROMPT, [0], "prompt 7")
    sampler.choose(np.zeros(3, dtype=np.float32))
    with pytest.raises(RunnerError, match=f"{what}.* at step 1 of prompt 7") as error:
        sampler.choose(np.array(logits, dtype=np.float32))
    assert error.value.exit_code == 1


def test_an_end_beyond_the_vocabulary_is_none() -> None:
    config = GenerationConfig(min_new_tokens=1, eos_token_id=(2, 99))
    logits = np.array([1.0, 2.0, 3.0], np.float32)
    np.testing.assert_array_equal(process_logits(logits, PROMPT, 0, config), [1.0, 2.0, -np.inf])


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_the_token_before_changes_nothing(spread: float) -> None:
    """It only tells where the largest scores may be found."""
    random, top = np.random.default_rng(1), TopK(50)
    for step in range(20):
        logits = random.normal(step * spread, 1 + step % 5, size=5000).astype(np.float32)
        logits[: 10 * (step % 3)] = 3.0  # many alike
        expected = np.flatnonzero(logits >= np.sort(logits)[-50])
        for found in (top, TopK(50)):
            ids, near = found.largest(logits)
            np.testing.assert_array_equal(ids, expected)
            np.testing.assert_array_equal(near, logits[expected])


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 3}, {"pad_token_id": 4}])
def test_logits_are_the_same_after_choosing(options: dict[str, Any]) -> None:
    """They belong to the backend, and log-probabilities are of them."""
    config = GenerationConfig(
        repetition_penalty=1.5, min_new_tokens=2, eos_token_id=(7, 99), **options
    )
    logits = np.random.default_rng(2).normal(size=8).astype(np.float32)
    before = logits.copy()
    fixed = logits.copy()
    fixed.flags.writeable = False
    prompt = np.array([1, 4, 1], dtype=np.int32)
    one, other, kept = (Sampler(config, prompt, [0], keep_scores=k) for k in (False, False, True))
    seen = prompt.tolist()
    for step in range(4):
        token = one.choose(logits)
        np.testing.assert_array_equal(logits, before)
        assert token == other.choose(fixed) == kept.choose(fixed)
        expected = process_logits(before, np.array(seen), step, config)
        np.testing.assert_array_equal(kept.scores, expected)
        seen.append(token)
    broken = np.full(8, np.nan, np.float32)
    broken[1] = 1.0
    with pytest.raises(RunnerError):
        one.choose(broken)
    assert broken[1] == 1.0


TOLERANCE = 1e-4
TOP = 5
LOGPROB_CASES = [
    *((case, "native") for case in references.covering(references.every())),
    *((case, "online") for case in ("bloom", "qwen3")),
]
Reference = Callable[[str], Any]


@each(("case", "kind"), LOGPROB_CASES)
def test_logprobs_equal_those_of_transformers(case: str, kind: str, reference: Reference) -> None:
    """The forced tokens behind each prompt are scored, and the token that follows is drawn."""
    known = reference(case)
    model = getattr(known, kind)(2, known.length + 1)
    scored = None if known.config.prefix else TOP  # tokens of a prefix see those behind them
    options = GenerationConfig(max_new_tokens=1, logprobs=TOP, prompt_logprobs=scored)
    texts = [np.append(*pair) for pair in zip(known.prompts, known.forced, strict=True)]
    requests = [Request(text, options) for text in texts]
    completions = Engine(model).generate(requests).completions
    steps = known.forced.shape[1]
    for text, completion, after, whole in zip(
        texts, completions, known.logits, known.logits_no_cache, strict=True
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


def test_logprobs_of_a_drawn_text_are_those_of_a_prompt(reference: Reference) -> None:
    known = reference("llama")
    model = known.native(3, 64)
    options = GenerationConfig(max_new_tokens=9, logprobs=2, do_sample=True, temperature=2.0)
    requests = [Request(prompt, options) for prompt in known.prompts]
    completions = Engine(model).generate(requests).completions
    again = GenerationConfig(max_new_tokens=1, prompt_logprobs=2)
    for prompt, completion in zip(known.prompts, completions, strict=True):
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


def test_logprobs_as_plain_data() -> None:
    found = Logprobs(
        np.array([-0.5, -np.inf]), np.array([[7], [8]], np.int32), np.array([[-0.5], [np.nan]])
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
    outcome = generated(backend, [prompt], options, interrupted=lambda: next(steps))
    (completion,) = outcome.completions
    assert outcome.interrupted and logprobs_of(completion) == []
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
def test_log_likelihoods_equal_scipy(
    count: int, vocab: int, scale: float, shift: float, block: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((count, vocab)) * scale + shift).astype(np.float32)
    following = random.integers(0, vocab, count).astype(np.int32)
    before, top = logits.copy(), min(vocab, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "BLOCK_BYTES", block)
        found, ids, best = log_likelihoods(logits, following, top)
    every = log_softmax(logits.astype(np.float64), axis=1)
    wanted = every[np.arange(count), following]
    assert found.dtype == np.float64 and np.array_equal(logits, before)
    # float32 differences of logits are exact to their last bit; sums to far more.
    assert np.allclose(found, wanted, rtol=2e-7, atol=1e-6)
    assert ids.dtype == np.int32 and best.dtype == np.float64
    assert np.array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :top])
    assert np.allclose(best, np.take_along_axis(every, ids, axis=1), rtol=2e-7, atol=1e-6)


def test_top_logprobs_are_computed_only_on_request() -> None:
    logits = np.array([[1, 3, 2]], np.float32)
    found, ids, best = log_likelihoods(logits, np.array([2], np.int32))
    assert (ids.shape, best.shape) == ((1, 0), (1, 0))
    chosen, ids, best = log_likelihoods(logits, np.array([2], np.int32), 7)
    assert chosen == found == best[0, 1]
    assert ids.tolist() == [[1, 2, 0]]  # no more than there are


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[1, 2] = bad
    found, _, best = log_likelihoods(logits, np.zeros(3, np.int32), 1)
    assert np.isnan(found[1]) and np.isnan(best[1])
    assert np.allclose(found[[0, 2]], -np.log(5))


def test_impossible_tokens_are_minus_infinity() -> None:
    logits = np.array([[0, -np.inf, 0]], np.float32)
    with np.errstate(all="raise"):
        assert log_likelihoods(logits, np.array([0], np.int32))[0][0] == pytest.approx(-np.log(2))
    assert log_likelihoods(logits, np.array([1], np.int32))[0][0] == -np.inf
