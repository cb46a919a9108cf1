"""Buckets that fill up with time."""

from __future__ import annotations

import pytest

from lite_runner.system import bucket
from lite_runner.system.bucket import Bucket


def test_an_allowance_fills_up_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(bucket.time, "monotonic", lambda: now)
    allowance = Bucket(6, 6 / 60)
    allowance.take(8)
    assert allowance.available == -2 and allowance.seconds_until(1) == pytest.approx(30)
    now += 30
    assert allowance.seconds_until(1) == pytest.approx(0)
    now += 1000
    assert allowance.available == 6
