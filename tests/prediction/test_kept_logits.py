"""Logits on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lite_runner.prediction.kept_logits import KeptLogits


def test_steps_come_back_in_order(tmp_path: Path) -> None:
    kept = KeptLogits(tmp_path / "kept", 3)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for row in rows:
        kept.add(4, 0, row, row)
    kept.add(4, 1, rows[1], rows[1])
    np.testing.assert_array_equal(kept.steps(4, 0), rows)
    np.testing.assert_array_equal(kept.steps(4, 1), rows[1:])
    assert kept.steps(0, 0).shape == (0, 3)
