"""Perplexity by MindFormers: over a stand-in whose position i says token i + 1, and by the real."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
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
    words = ["model=tiny_bloom", THEIRS, "compare_backend=ms", "eval_window=32"]
    assert main([*EVAL, *words, "compare_tolerance=1e-6"]) == 1
    said = capsys.readouterr().err
    assert (
        "compare_backend=ms: 2 of 2 windows differ from backend=mindformers by more than"
        " compare_tolerance=1e-06 in a token's log-likelihood"
    ) in said
    assert "DIFFERS" in said
    result: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    comparison = result["comparison"]
    assert [side["backend"] for side in comparison["sides"]] == ["mindformers", "ms"]
    assert comparison["sides"][0]["perplexity"] == result["evaluation"]["perplexity"]
    assert [(one["first"], one["differs"]) for one in comparison["windows"]] == [
        (1, True),
        (33, True),
    ]
    assert main([*EVAL, *words, "compare_tolerance=9"]) == 0


def test_a_comparison_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the first backend found is written."""
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(python_of(tmp_path, score="die")))
    assert main([*EVAL, "model=tiny_bloom", "compare_backend=mindformers"]) == 1
    said = capsys.readouterr().err
    assert "compare_backend=mindformers: scoring: MindFormers 1.0.2 was killed by SIGKILL" in said
    result = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    assert result["evaluation"]["perplexity"] > 1 and "comparison" not in result


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("model", "tolerance"), [("tiny_gpt2", 2e-3), ("tiny_bloom", 2e-3), ("tiny_qwen2", 1e-5)]
)
def test_the_real_one(
    mindformers_python: Path,
    mindformers_1_9_python: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    tolerance: float,
) -> None:
    """Ours and MindFormers' perplexity; its bloom and gpt2 compute heads and layers in float16."""
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(mindformers_python))
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_1_9_PYTHON", str(mindformers_1_9_python))
    words = [f"model={model}", "eval_window=24", "eval_stride=16"]
    result = run(*words, THEIRS, "compare_backend=ms", "compare_tolerance=0.02")
    release = "1.9.0, argmax stand-in" if model == "tiny_qwen2" else "1.0.2"
    theirs, ours = result["comparison"]["sides"]
    assert theirs["engine"] == result["engine"] == f"mindformers-{release}"
    assert theirs["perplexity"] == pytest.approx(ours["perplexity"], rel=tolerance)
    counted = sum(window["tokens"] for window in result["comparison"]["windows"])
    assert counted == result["evaluation"]["scored_tokens"]
    assert theirs["peak_rss_mib"] > 200  # with MindFormers' process
