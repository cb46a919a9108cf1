"""Windows over a text, and the perplexity of one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from lite_runner import progress
from lite_runner.errors import RunnerError
from lite_runner.evaluation.perplexity import BackendScorer, evaluate, windows
from tests.evaluation.fake_backend import FakeBackend, logits_of_positions


def labels(tokens: int, size: int, stride: int) -> list[list[int]]:
    """Places that are scored in each window: transformers' recipe, which blanks the labels that an
    earlier window had, and never asks for a window's first token."""
    found, seen = [], 0
    for begin in range(0, tokens, stride):
        end = min(begin + size, tokens)
        target = list(range(begin, end))
        target[: len(target) - (end - seen)] = [-100] * (len(target) - (end - seen))
        found.append([place for place in target[1:] if place != -100])
        seen = end
        if end == tokens:
            break
    return [places for places in found if places]


sizes = st.integers(2, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@given(tokens=st.integers(2, 200), size_and_stride=sizes)
def test_windows_are_those_of_transformers(tokens: int, size_and_stride: tuple[int, int]) -> None:
    size, stride = size_and_stride
    found = list(windows(tokens, size, stride))
    assert [list(range(w.first, w.end)) for w in found] == labels(tokens, size, stride)
    for window in found:
        assert window.start < window.first and window.end - window.start <= size
        assert window.end == min(window.start + size, tokens)
    counted = [place for w in found for place in range(w.first, w.end)]
    starts = [] if stride < size else list(range(0, tokens, size))
    assert counted == [place for place in range(1, tokens) if place not in starts]


@given(tokens=st.integers(2, 120), size_and_stride=sizes)
def test_each_token_counts_with_its_own_window(
    tokens: int, size_and_stride: tuple[int, int]
) -> None:
    size, stride = size_and_stride
    ids = (np.arange(tokens) % 7).astype(np.int32)
    found = evaluate(BackendScorer(FakeBackend()), ids, size, stride)
    likely = log_softmax(logits_of_positions(size).astype(np.float64), axis=1)
    losses = [
        -likely[place - window.start - 1, ids[place]]
        for window in windows(tokens, size, stride)
        for place in range(window.first, window.end)
    ]
    assert found.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    assert (found.scored_tokens, found.tokens) == (len(losses), tokens)
    assert not found.interrupted


@pytest.mark.parametrize(("stride", "shown"), [(10, [10, 10, 10, 10]), (4, [10, *[4] * 7, 2])])
def test_progress_counts_every_token_once(
    monkeypatch: pytest.MonkeyPatch, stride: int, shown: list[int]
) -> None:
    advanced: list[int] = []

    @contextlib.contextmanager
    def step(name: str, total: int, unit: str) -> Iterator[SimpleNamespace]:
        assert total == 40
        yield SimpleNamespace(advance=advanced.append)

    monkeypatch.setattr(progress, "step", step)
    evaluate(BackendScorer(FakeBackend()), np.ones(40, np.int32), 10, stride)
    assert advanced == shown


def test_ctrl_c_keeps_the_windows_that_are_done() -> None:
    scorer = FakeBackend({2: KeyboardInterrupt()})
    found = evaluate(BackendScorer(scorer), np.ones(40, np.int32), 10, 10)
    assert (found.windows, found.scored_tokens, found.interrupted) == (2, 18, True)
    with pytest.raises(KeyboardInterrupt):
        evaluate(
            BackendScorer(FakeBackend({0: KeyboardInterrupt()})), np.ones(40, np.int32), 10, 10
        )


def test_what_is_no_number_is_an_error_that_says_where() -> None:
    with pytest.raises(RunnerError, match="the likelihood of token 11 is nan"):
        evaluate(BackendScorer(FakeBackend({1: math.nan})), np.ones(40, np.int32), 10, 10)
    with pytest.raises(RunnerError, match=r"beyond any number: exp\(800\)"):
        evaluate(BackendScorer(FakeBackend({0: -799.0})), np.ones(2, np.int32), 10, 10)
