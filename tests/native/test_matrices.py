"""The bytes of packed matrices. Products with them: test_linear.py, test_blocks.py."""

from __future__ import annotations

import numpy as np
import pytest

from lite_runner.native import matrices
from lite_runner.weights.quantization.quantized import quantize


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


def test_a_table_is_of_int8_where_a_power_of_2_makes_it() -> None:
    for table, factor in (([-127, 3, 127], 1), ([0.5, 6], 2), ([128], 0), ([0.3], 0)):
        assert matrices._integer_factor(np.array(table, np.float32)) == factor, table


@pytest.mark.parametrize("group", [0, 32])
def test_a_rank_has_columns_to_spare_only_of_groups_that_are_cut(group: int) -> None:
    floats = np.ones((4, 96), np.float32)
    integers = quantize(floats, 8, group)
    assert matrices.surplus(integers, 48, 96) == (0, 0)  # the whole width: cut when it was packed
    assert matrices.surplus(floats, 48, 48) == (0, 0)  # floats have no groups
    if group:
        assert matrices.surplus(integers, 48, 24) == (16, 56)
