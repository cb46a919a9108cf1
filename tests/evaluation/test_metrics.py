"""Scores, standard errors by lm_eval's formulas, and the significance of differences."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lite_runner.errors import EnvironmentFault
from lite_runner.evaluation import metrics
from lite_runner.evaluation.metrics import (
    MetricResult,
    adgen,
    difference,
    em_f1,
    exact_match,
    f1,
    figures,
    filtered,
    mcnemar,
    pooled,
    split_words,
)
from lite_runner.evaluation.tasks import Metric, read_task
from tests.paths import FIXTURES


def test_answers_of_gsm8k() -> None:
    strict, flexible = read_task("gsm8k").filters
    text = "It costs $12 and 3. #### 1,234 and 5.0."
    assert filtered(strict, text, "t") == "1,234"
    assert filtered(flexible, text, "t") == "5.0."
    assert filtered(strict, "none", "t") == "[invalid]"
    (metric,) = read_task("gsm8k").metrics
    assert exact_match(metric, "1,234.", "She has it.\n#### 1234", "t") == 1
    assert exact_match(metric, "1235", "#### 1234", "t") == 0


def test_ignored_characters_of_exact_match() -> None:
    assert exact_match(Metric("exact_match"), "A", "a", "t") == 0
    assert exact_match(Metric("exact_match", ignore_case=True), "A", "a", "t") == 1
    ignores = Metric("exact_match", ignore_punctuation=True, ignore_numbers=True)
    assert exact_match(ignores, "a-1.", "a", "t") == 1


def test_f1() -> None:
    metric = Metric("f1")
    assert f1(metric, "The red wall", "a red house.", "t") == 0.5
    assert f1(metric, "北京", "北海", "t") == 0.5
    assert f1(metric, "", "a", "t") == 1.0  # articles do not count


@pytest.fixture(scope="module")
def of_mindformers() -> dict[str, Any]:
    """The results of MindFormers 1.0.2's metrics: see make_mindformers_metrics.py."""
    path = FIXTURES / "evaluation/mindformers_metrics.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def test_em_f1_matches_mindformers(of_mindformers: dict[str, Any]) -> None:
    scores = []
    for pair in of_mindformers["pairs"]:
        scores.append(em_f1(pair["answer"], pair["target"]))
        expected = {"em": pair["em_f1"]["Em"], "em_f1": pair["em_f1"]["F1"]}
        assert scores[-1] == pytest.approx(expected)
    found = {one.metric: one.value for one in figures(scores)}
    every = of_mindformers["all_em_f1"]
    assert found == pytest.approx({"em": every["Em"], "em_f1": every["F1"]})


def test_adgen_matches_mindformers(
    of_mindformers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chinese words are those that jieba cut; of other texts it cuts as we do."""
    cuts = {
        text: words
        for pair in of_mindformers["pairs"]
        for text, words in zip((pair["answer"], pair["target"]), pair["words"], strict=True)
    }
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(cut=cuts.__getitem__))
    for pair in of_mindformers["pairs"]:
        expected = {name.replace("-", "_"): value for name, value in pair["adgen"].items()}
        assert adgen(pair["answer"], pair["target"]) == expected
    assert all(split_words(text) == words for text, words in cuts.items())
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(EnvironmentFault, match="pip install jieba"):
        adgen("郑州", "郑州")


def test_token_perplexity_matches_mindformers(of_mindformers: dict[str, Any]) -> None:
    expected = of_mindformers["perplexity"]
    rows = [{"token_perplexity": one["logprob"] / one["tokens"]} for one in expected["rows"]]
    (found,) = figures(rows)
    assert found.value == pytest.approx(expected["PPL"], rel=1e-5)  # its loss has an epsilon


def test_standard_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1.0, 0.0, 1.0, 1.0]
    (found,) = figures([{"acc": value} for value in values])
    mean = sum(values) / 4
    deviation = math.sqrt(sum((one - mean) ** 2 for one in values) / 3)
    assert (found.value, found.stderr) == (mean, pytest.approx(deviation / 2))
    (alone,) = figures([{"acc": 1.0}])
    assert alone.stderr is None
    logprobs = np.random.default_rng(1).normal(-2, 1, 400)
    (found,) = figures([{"perplexity": float(one)} for one in logprobs])
    assert found.value == pytest.approx(math.exp(-logprobs.mean()))
    by_delta = found.value * logprobs.std() / math.sqrt(400)
    assert found.stderr == pytest.approx(by_delta, rel=0.1)
    # Resamples of two values: both are the first, each is one, both are the second.
    (found,) = figures([{"perplexity": -900.0}, {"perplexity": -1000.0}])
    assert math.isfinite(found.value) and found.stderr is None  # exp overflows
    (found,) = figures([{"perplexity": 0.0}, {"perplexity": -2.0}])
    resamples = np.exp([0.0, 1.0, 1.0, 2.0])
    assert found.stderr == pytest.approx(resamples.std(), rel=0.1)
    # The same in each run, and as many resamples where not all are drawn at a time.
    drawn = np.random.default_rng(0).integers(0, 2, (metrics.RESAMPLES, 2))
    assert found.stderr == pytest.approx(np.exp(2 * drawn.mean(axis=1)).std(ddof=1))
    monkeypatch.setattr(metrics, "RESAMPLED", 6)
    assert len(metrics._resampled(np.zeros(2))) == metrics.RESAMPLES


def test_parts_are_pooled() -> None:
    parts = [
        (MetricResult(metric="acc", value=0.5, stderr=0.1), 30),
        (MetricResult(metric="acc", value=0.8, stderr=0.2), 10),
    ]
    found = pooled(parts)
    assert found.value == pytest.approx(0.575)
    variance = (29 * 0.1**2 * 30 + 9 * 0.2**2 * 10) / 38
    assert found.stderr == pytest.approx(math.sqrt(variance / 40))


def test_significance() -> None:
    # Here: each worker collects this file, and the import takes a third of a second.
    from scipy.stats import binomtest

    for better, worse in ((0, 0), (3, 3), (1, 9), (40, 20), (900, 1000)):
        count = better + worse
        known = binomtest(better, count).pvalue if count else 1.0
        assert mcnemar(better, worse) == pytest.approx(known)
    mine, other = [1.0] * 30 + [0.0] * 10, [1.0] * 20 + [0.0] * 20
    found = difference("t", "acc", mine, other)
    assert (found.better, found.worse, found.samples) == (10, 0, 40)
    assert found.p == pytest.approx(2 / 2**10)
    assert 0.1 < found.low < 0.25 < found.high <= 0.4
