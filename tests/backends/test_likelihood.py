"""Log-likelihoods against SciPy's log_softmax."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from lite_runner.backends import likelihood
from lite_runner.backends.likelihood import log_likelihoods, rows_at_once


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
    before = logits.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likelihood, "BLOCK_BYTES", block)
        found = log_likelihoods(logits, following)
    wanted = log_softmax(logits.astype(np.float64), axis=1)[np.arange(count), following]
    assert found.dtype == np.float64 and np.array_equal(logits, before)
    # float32 differences of logits are exact to their last bit; sums to far more.
    assert np.allclose(found, wanted, rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_no_number(bad: float) -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[1, 2] = bad
    found = log_likelihoods(logits, np.zeros(3, np.int32))
    assert np.isnan(found[1]) and np.allclose(found[[0, 2]], -np.log(5))


def test_what_cannot_come_is_minus_infinity() -> None:
    logits = np.array([[0, -np.inf, 0]], np.float32)
    with np.errstate(all="raise"):
        assert log_likelihoods(logits, np.array([0], np.int32))[0] == pytest.approx(-np.log(2))
    assert log_likelihoods(logits, np.array([1], np.int32))[0] == -np.inf


@pytest.mark.parametrize(
    ("vocab", "longest", "expected"),
    [(49152, 512, 256), (250880, 512, 64), (320, 512, 512), (320, 32, 32), (10**9, 512, 1)],
)
def test_rows_at_once_stay_within_their_memory(vocab: int, longest: int, expected: int) -> None:
    assert rows_at_once(vocab, longest) == expected
    assert expected == 1 or 4 * vocab * expected <= likelihood.LOGITS_BYTES
