"""The bytes of packed matrices. Products with them: test_linear.py, test_blocks.py."""

from __future__ import annotations

import numpy as np
import pytest

from lite_runner.native import matrices


def test_biases_of_panels_in_turn_are_one_of_each() -> None:
    weight = np.ones((40, 16), np.float32)
    first, second = np.arange(40, dtype=np.float32), -np.arange(40, dtype=np.float32)
    block = matrices.matrix(matrices.Alternating(weight, weight), (first, second)).block()
    panels = block[-4 * 128 :].view(np.float32).reshape(4, 32)
    np.testing.assert_array_equal(panels[0], first[:32])
    np.testing.assert_array_equal(panels[1], second[:32])
    np.testing.assert_array_equal(panels[2, :8], first[32:])
    np.testing.assert_array_equal(panels[3, :8], second[32:])
    assert not panels[2:, 8:].any()
    with pytest.raises(AssertionError):
        matrices.matrix(weight, (first, second))
