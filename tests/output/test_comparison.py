"""Two runs, by their result.json and computed values, that count as the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.output.comparison import (
    SHOWN,
    ScoreComparison,
    TextComparison,
    compare_scores,
    compare_texts,
)
from lite_runner.output.completions import logits_file
from lite_runner.output.scoring import LIKELIHOODS

LOGITS = np.array([[0, 4, 1], [0, 1, 5], [3, 2.98, 0]], np.float32)
TIMING = {"load_s": 1.0, "compile_s": 0.5, "prefill_tok_s": 9.0, "decode_tok_s": None}
Run = tuple[dict[str, Any], Path]


def of(folder: Path, **result: Any) -> Run:
    folder.mkdir()
    sizes = {"timing": TIMING, "peak_rss_mib": 100.0}
    return {"backend": folder.name, "engine": f"engine of {folder.name}", **sizes, **result}, folder


def run(folder: Path, tokens: list[int], logits: np.ndarray, reason: str = "length") -> Run:
    found = of(folder, results=[{"token_ids": tokens, "finish_reason": reason}])
    if len(logits):
        logits_file(folder, 0, 0).write_bytes(logits.tobytes())
    return found


def compared(mine: Run, other: Run, tolerance: float = 0.05) -> TextComparison:
    results, values = zip(mine, other, strict=True)
    return compare_texts(results, values, tolerance=tolerance, returns=1, vocab_size=3)


def test_equal_texts(tmp_path: Path) -> None:
    mine = run(tmp_path / "a", [1, 2, 0], LOGITS)
    found = compared(mine, run(tmp_path / "b", [1, 2, 0], LOGITS + 0.01))
    (text,) = found.texts
    assert found.same and (text.equal, text.tokens, text.gap) == (3, 3, None)
    assert text.logit_difference == pytest.approx(0.01, rel=1e-3)
    assert [side["engine"] for side in found.sides] == ["engine of a", "engine of b"]
    assert found.table()[1].split()[4:] == ["1.0", "0.5", "9.0", "-", "100"]
    assert found.table()[-1].split() == ["0", "3", "of", "3", "0.01", "-", "same"]
    stricter = compared(mine, run(tmp_path / "c", [1, 2, 0], LOGITS + 0.01), 0.001)
    assert not stricter.same and stricter.table()[-1].endswith("DIFFERS")


def test_a_near_tie_is_the_same(tmp_path: Path) -> None:
    other = LOGITS.copy()
    other[2] = [2.98, 3, 0]
    found = compared(run(tmp_path / "a", [1, 2, 0], LOGITS), run(tmp_path / "b", [1, 2, 1], other))
    (text,) = found.texts
    assert found.same and text.equal == 2 and text.gap == pytest.approx(0.02, rel=1e-3)
    assert found.table()[-1].endswith("same, except for a near tie")


def test_another_token(tmp_path: Path) -> None:
    mine = run(tmp_path / "a", [1, 2, 0], LOGITS)
    found = compared(mine, run(tmp_path / "b", [1, 0, 0], LOGITS[:, ::-1]))
    assert not found.same and found.texts[0].equal == 1
    without = compared(
        run(tmp_path / "c", [1, 2], LOGITS[:0]), run(tmp_path / "d", [1, 0], LOGITS[:0])
    )
    (text,) = without.texts
    assert text.differs and text.logit_difference is None and text.gap is None


def test_an_end_token_counts(tmp_path: Path) -> None:
    ended = run(tmp_path / "a", [1, 2], LOGITS[:0], "stop")
    longer = compared(ended, run(tmp_path / "b", [1, 2], LOGITS[:0]))
    assert not longer.same and (longer.texts[0].equal, longer.texts[0].tokens) == (2, 3)
    assert compared(ended, run(tmp_path / "c", [1, 2], LOGITS[:0], "stop")).same


def test_nan_differs(tmp_path: Path) -> None:
    other = np.full_like(LOGITS, np.nan)
    found = compared(run(tmp_path / "a", [1, 2, 0], LOGITS), run(tmp_path / "b", [1, 2, 0], other))
    assert not found.same


def scored(folder: Path, windows: Sequence[Sequence[float]], stride: int = 3) -> Run:
    """Windows without overlap, of which the first token never counts."""
    count = sum(map(len, windows))
    found = of(
        folder,
        evaluation={
            "perplexity": math.exp(-sum(map(sum, windows)) / count),
            "tokens": count + len(windows),
            "window": stride,
            "stride": stride,
            "tok_s": 3.25,
        },
    )
    np.concatenate([np.array(window) for window in windows]).tofile(folder / LIKELIHOODS)
    return found


def compared_scores(mine: Run, other: Run, tolerance: float) -> ScoreComparison:
    results, values = zip(mine, other, strict=True)
    return compare_scores(results, values, tolerance=tolerance)


def test_the_token_that_differs_most(tmp_path: Path) -> None:
    mine = scored(tmp_path / "ms", [[-1.0, -2.0], [-0.5]])
    other = scored(tmp_path / "mindformers", [[-1.01, -1.75], [-0.5]])
    found = compared_scores(mine, other, 0.05)
    first, second = found.windows
    assert (first.first, first.tokens, first.token, first.differs) == (1, 2, 2, True)
    assert first.difference == pytest.approx(0.25)
    assert first.nll == pytest.approx([1.5, 1.38])
    assert (second.first, second.difference, second.differs) == (4, 0.0, False)
    assert not found.same
    assert found.sides[0]["nll"] == pytest.approx(3.5 / 3)
    assert compared_scores(mine, other, 0.25).same
    lines = found.table()
    assert lines[1].split() == "ms engine of ms 1.0 0.5 3.2 100 1.16667 3.2113".split()
    assert lines[3].split()[:3] == ["tokens", "nll", "ms"]
    assert lines[4].split() == "1 to 2 1.50000 1.38000 0.25 2 DIFFERS".split()
    assert lines[5].split() == "4 to 4 0.50000 0.50000 0 4 same".split()


def test_a_likelihood_of_nan_differs(tmp_path: Path) -> None:
    mine = scored(tmp_path / "a", [[-1.0, -2.0], [-0.5, -1.0]])
    values = np.array([-1.0, -2.0, math.nan, -1.0])
    other = mine[0], scored(tmp_path / "b", [[-1.0, -2.0], [-0.5, -1.0]])[1]
    values.tofile(other[1] / LIKELIHOODS)
    found = compared_scores(mine, other, 1.0)
    assert [window.differs for window in found.windows] == [False, True]


def test_of_many_windows_the_log_has_those_that_differ_most(tmp_path: Path) -> None:
    mine = scored(tmp_path / "a", [[-1.0]] * 30, stride=2)
    other = scored(tmp_path / "b", [[-1.0 - place / 1000] for place in range(30)], stride=2)
    lines = compared_scores(mine, other, 1.0).table()
    assert lines[-1] == "the 10 of 30 windows that differ most; result.json has all"
    places = [int(line.split()[0]) for line in lines[4:-1]]
    assert places == [2 * place + 1 for place in range(30 - SHOWN, 30)]
