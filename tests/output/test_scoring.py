"""Perplexity by MindFormers: over a stand-in whose position i says token i + 1, and by the real."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from lite_runner import progress
from lite_runner.app import main
from lite_runner.errors import RunnerError
from lite_runner.output.scoring import BackendScorer, evaluate, windows
from tests.output.fake_backend import FakeBackend, logits_of_positions
from tests.stand_in_mindformers import python_of

TEXT = "A text, neither long nor short, of bytes: AB.\n"
EVAL = ["run_mode=eval", "eval_data=text.txt", "load_checkpoint=random", "weights_seed=3"]
THEIRS = "backend=mindformers"


@pytest.fixture(autouse=True)
def text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(python_of(tmp_path)))


def run(*words: str) -> dict[str, Any]:
    assert main([*EVAL, *words]) == 0
    found: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    return found


@pytest.mark.usefixtures("stand_in")
def test_windows_of_a_text() -> None:
    """No byte of the text is its place in a window, so each has a logit of 0 beside one of 1."""
    result = run("model=tiny_bloom", THEIRS, "eval_window=16", "eval_stride=8")
    assert result["engine"] == "mindformers-1.0.2"
    found, vocab = result["evaluation"], 320
    assert (found["window"], found["stride"]) == (16, 8)
    assert found["scored_tokens"] == found["tokens"] - 1
    assert found["perplexity"] == pytest.approx(vocab - 1 + math.e)
    written = Path("outputs/latest/mindformers.yaml").read_text(encoding="utf-8")
    assert "seq_length: 16" in written and "use_past: false" in written


@pytest.mark.usefixtures("stand_in")
def test_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    """The stand-in knows nothing of the weights: all windows differ, and the run's files say so."""
    words = ["model=tiny_bloom", THEIRS, "compare_backend=native", "eval_window=32"]
    assert main([*EVAL, *words, "compare_tolerance=1e-6"]) == 1
    stderr = capsys.readouterr().err
    assert (
        "compare_backend=native: 2 of 2 windows differ from backend=mindformers by more than"
        " compare_tolerance=1e-06 in a token's log-likelihood"
    ) in stderr
    assert "DIFFERS" in stderr
    result: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    comparison = result["comparison"]
    assert [side["backend"] for side in comparison["sides"]] == ["mindformers", "native"]
    assert comparison["sides"][0]["perplexity"] == result["evaluation"]["perplexity"]
    assert [(one["first"], one["differs"]) for one in comparison["windows"]] == [
        (1, True),
        (33, True),
    ]
    assert main([*EVAL, *words, "compare_tolerance=9"]) == 0


def test_a_comparison_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results of the first backend are written."""
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(python_of(tmp_path, score="die")))
    assert main([*EVAL, "model=tiny_bloom", "compare_backend=mindformers"]) == 1
    stderr = capsys.readouterr().err
    assert "compare_backend=mindformers: scoring: MindFormers 1.0.2 was killed by SIGKILL" in stderr
    result = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    assert result["evaluation"]["perplexity"] > 1 and "comparison" not in result


def test_refused_input(capsys: pytest.CaptureFixture[str]) -> None:
    bloom = [*EVAL, "model=tiny_bloom", THEIRS]
    for words, expected in (
        (["quant=a16w8"], "quant: backend=mindformers has no quantized weights"),
        (["context.mode=1"], "context.mode: backend=mindformers has no pynative mode"),
        (["mindformers.release=1.9.0"], "MindFormers 1.9.0 cannot compute tiny_bloom"),
        (["backend=ms", "mindformers.release=1.9.0"], "only with backend=mindformers"),
        (
            ["backend=ms", "compare_backend=mindformers", "mindformers.release=1.9.0"],
            "MindFormers 1.9.0 cannot compute tiny_bloom",
        ),
    ):
        assert main([*bloom, *words]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("model", "tolerance"), [("tiny_bloom", 2e-3), ("tiny_qwen2", 1e-5)])
def test_the_real_one(
    mindformers_python: Path,
    mindformers_1_9_python: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    tolerance: float,
) -> None:
    """Ours and MindFormers' perplexity; its bloom computes heads and layers in float16."""
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(mindformers_python))
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_1_9_PYTHON", str(mindformers_1_9_python))
    words = [f"model={model}", "eval_window=24", "eval_stride=16"]
    result = run(*words, THEIRS, "compare_backend=native", "compare_tolerance=0.02")
    release = "1.9.0, argmax stand-in" if model == "tiny_qwen2" else "1.0.2"
    theirs, ours = result["comparison"]["sides"]
    assert theirs["engine"] == result["engine"] == f"mindformers-{release}"
    assert theirs["perplexity"] == pytest.approx(ours["perplexity"], rel=tolerance)
    counted = sum(window["tokens"] for window in result["comparison"]["windows"])
    assert counted == result["evaluation"]["scored_tokens"]
    assert theirs["peak_rss_mib"] > 200  # with MindFormers' process


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


def test_nan_is_an_error_that_says_where() -> None:
    with pytest.raises(RunnerError, match="the likelihood of token 11 is nan"):
        evaluate(BackendScorer(FakeBackend({1: math.nan})), np.ones(40, np.int32), 10, 10)
    with pytest.raises(RunnerError, match=r"overflows: exp\(800\)"):
        evaluate(BackendScorer(FakeBackend({0: -799.0})), np.ones(2, np.int32), 10, 10)
