from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.bench.spread import Spread, number, percentile

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


@given(VALUES)
def test_spread_is_numpys(values: list[float]) -> None:
    found = Spread.of(values)
    assert found.values == tuple(values)
    assert (found.min, found.max) == (min(values), max(values))
    assert found.median == pytest.approx(np.median(values))
    assert [found.q1, found.q3] == pytest.approx(np.percentile(values, [25, 75]))
    assert found.half_range == pytest.approx(np.ptp(values) / 2)


def test_ranges_overlap_where_they_share_a_value() -> None:
    low, high, between = Spread.of([1, 2]), Spread.of([3, 4]), Spread.of([2, 3])
    assert not low.overlaps(high) and not high.overlaps(low)
    assert between.overlaps(low) and high.overlaps(between)


@pytest.mark.parametrize(
    ("value", "text"), [(2957.4, "2957"), (71.66, "71.7"), (4.724, "4.72"), (0.0314, "0.03")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
