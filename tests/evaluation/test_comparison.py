"""Two backends that scored a text, side by side."""

from __future__ import annotations

import math

import pytest

from lite_runner.evaluation.comparison import compare_scores
from lite_runner.evaluation.scoring import Scored, ScoredWindow
from lite_runner.output.comparison import SHOWN
from lite_runner.output.report import Evaluation

MINE = [[-1.0, -2.0], [-0.5]]


def scored(windows: list[list[float]], first: int = 1) -> Scored:
    kept = []
    for found in windows:
        kept.append(ScoredWindow(first=first, log_likelihoods=found))
        first += len(found)
    count = sum(map(len, windows))
    evaluation = Evaluation(
        perplexity=math.exp(-sum(map(sum, windows)) / count),
        tokens=count + 1,
        scored_tokens=count,
        windows=len(windows),
        window=8,
        stride=8,
        seconds=2.0,
        tok_s=3.25,
        interrupted=False,
    )
    return Scored(
        evaluation=evaluation,
        windows=kept,
        engine="an engine",
        load_s=1.0,
        compile_s=0.5,
        peak_rss_mib=100.0,
    )


def test_the_token_that_differs_most() -> None:
    other = scored([[-1.01, -1.75], [-0.5]])
    found = compare_scores(("ms", scored(MINE)), ("mindformers", other), tolerance=0.05)
    first, second = found.windows
    assert (first.first, first.tokens, first.token, first.differs) == (1, 2, 2, True)
    assert first.difference == pytest.approx(0.25)
    assert first.nll == pytest.approx([1.5, 1.38])
    assert (second.first, second.difference, second.differs) == (3, 0.0, False)
    assert not found.same
    assert found.sides[0].nll == pytest.approx(3.5 / 3)
    assert compare_scores(("ms", scored(MINE)), ("mslite", other), tolerance=0.25).same
    lines = found.table()
    assert lines[1].split() == "ms an engine 1.0 0.5 3.2 100 1.16667 3.2113".split()
    assert lines[3].split()[:3] == ["tokens", "nll", "ms"]
    assert lines[4].split() == "1 to 2 1.50000 1.38000 0.25 2 DIFFERS".split()
    assert lines[5].split() == "3 to 3 0.50000 0.50000 0 3 same".split()


def test_nan_differs() -> None:
    other = scored([[-1.0, -2.0], [-0.5]])
    other.windows[1].log_likelihoods[0] = math.nan  # type: ignore[index]
    found = compare_scores(("ms", scored(MINE)), ("mslite", other), tolerance=1.0)
    assert [window.differs for window in found.windows] == [False, True]


def test_of_many_windows_the_log_has_those_that_differ_most() -> None:
    mine = scored([[-1.0]] * 30)
    other = scored([[-1.0 - place / 1000] for place in range(30)])
    lines = compare_scores(("ms", mine), ("mslite", other), tolerance=1.0).table()
    assert lines[-1] == "the 10 of 30 windows that differ most; result.json has all"
    places = [int(line.split()[0]) for line in lines[4:-1]]
    assert places == list(range(31 - SHOWN, 31))


def test_it_goes_through_json() -> None:
    whole = scored(MINE)
    assert Scored.from_dict(whole.to_dict()) == whole
