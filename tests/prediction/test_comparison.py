"""What counts as the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lite_runner.config.generation import FinishReason
from lite_runner.output.comparison import Comparison
from lite_runner.output.report import RowResult
from lite_runner.prediction.comparison import Compared, StoredLogits, compare
from lite_runner.prediction.complete import RankResult

LOGITS = np.array([[0, 4, 1], [0, 1, 5], [3, 2.98, 0]], np.float32)


def run(
    folder: Path, tokens: list[int], logits: np.ndarray, reason: FinishReason = "length"
) -> Compared:
    kept = StoredLogits(folder, 3)
    for row in logits:
        kept.add(0, 0, row, row)
    rows = [RowResult("p", "t", tokens, 1, len(tokens), reason)]
    return folder.name, RankResult(rows=rows, engine=f"engine of {folder.name}"), kept


def compared(mine: Compared, other: Compared, tolerance: float = 0.05) -> Comparison:
    return compare(mine, other, tolerance=tolerance, returns=1)


def test_equal_texts(tmp_path: Path) -> None:
    mine = run(tmp_path / "a", [1, 2, 0], LOGITS)
    found = compared(mine, run(tmp_path / "b", [1, 2, 0], LOGITS + 0.01))
    (text,) = found.texts
    assert found.same and (text.equal, text.tokens, text.gap) == (3, 3, None)
    assert text.logit_difference == pytest.approx(0.01, rel=1e-3)
    assert [side.engine for side in found.sides] == ["engine of a", "engine of b"]
    assert found.table()[-1].split() == ["0", "3", "of", "3", "0.01", "-", "same"]
    stricter = compared(mine, run(tmp_path / "c", [1, 2, 0], LOGITS + 0.01), 0.001)
    assert not stricter.same and stricter.table()[-1].endswith("DIFFERS")


def test_a_near_tie_is_the_same(tmp_path: Path) -> None:
    other = LOGITS.copy()
    other[2] = [2.98, 3, 0]
    found = compared(run(tmp_path / "a", [1, 2, 0], LOGITS), run(tmp_path / "b", [1, 2, 1], other))
    (text,) = found.texts
    assert found.same and text.equal == 2 and text.gap == pytest.approx(0.02, rel=1e-3)
    assert found.table()[-1].endswith("same, but for a near tie")


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


def test_steps_come_back_in_order(tmp_path: Path) -> None:
    kept = StoredLogits(tmp_path / "kept", 3)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for row in rows:
        kept.add(4, 0, row, row)
    kept.add(4, 1, rows[1], rows[1])
    np.testing.assert_array_equal(kept.steps(4, 0), rows)
    np.testing.assert_array_equal(kept.steps(4, 1), rows[1:])
    assert kept.steps(0, 0).shape == (0, 3)
