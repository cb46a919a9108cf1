"""Log-likelihoods against SciPy's log_softmax."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from lite_runner.backends import likelihood
from lite_runner.backends.likelihood import log_likelihoods


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
        patch.setattr(likelihood, "BLOCK_BYTES", block)
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
