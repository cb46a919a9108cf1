"""A token bucket, for rate limits."""

from __future__ import annotations

import time


class Bucket:
    """An allowance, full at first. It may be overdrawn: what is taken may show at its end only."""

    def __init__(self, most: int, per_second: float) -> None:
        self.most, self._per_second = most, per_second
        self._left, self._at = float(most), time.monotonic()

    @property
    def available(self) -> float:
        """Units that may be taken now."""
        now = time.monotonic()
        self._left = min(self.most, self._left + (now - self._at) * self._per_second)
        self._at = now
        return self._left

    def take(self, amount: int) -> None:
        """Take so much of it, whether it is there or not."""
        self._left = self.available - amount

    def seconds_until(self, amount: float) -> float:
        """Until there is so much."""
        return max(0.0, (amount - self.available) / self._per_second)
