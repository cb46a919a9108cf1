from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends.base import Row

Logits = Callable[[list[int], int], NDArray[np.float32]]


class MockBackend:
    """Logits are a function of a slot's tokens: a wrong slot, position or copy changes them."""

    def __init__(self, logits: Logits, slots: int, max_length: int) -> None:
        self.slots = slots
        self.max_length = max_length
        self.vocab_size = len(logits([0], 0))
        self.prefilled: list[list[int]] = []
        self.calls: list[int] = []
        self._logits = logits
        self._history: list[list[int]] = [[] for _ in range(slots)]

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        assert len({row.slot for row in rows}) == len(rows) > 0
        self.calls.append(len(rows))
        for row in rows:
            assert row.tokens.dtype == np.int32 and len(row.tokens) >= 1
            history = self._history[row.slot]
            if row.position == 0:
                history.clear()
                self.prefilled.append(row.tokens.tolist())
            assert row.position == len(history)
            history += row.tokens.tolist()
            assert len(history) <= self.max_length
        logits = np.stack([self._logits(self._history[r.slot], r.adapter) for r in rows])
        logits.flags.writeable = False
        return logits

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len(set(targets)) == len(targets) == len(sources) > 0
        taken = [list(self._history[source]) for source in sources]
        for target, history in zip(targets, taken, strict=True):
            self._history[target] = history

    def close(self) -> None: ...


def hashed_logits(history: list[int], adapter: int) -> NDArray[np.float32]:
    """Different for every history; vocabulary of 16."""
    random = np.random.default_rng([adapter, len(history), *history])
    return random.normal(scale=2.0, size=16).astype(np.float32)


@pytest.fixture
def backend() -> Callable[..., MockBackend]:
    def make(
        logits: Logits = hashed_logits, *, slots: int = 4, max_length: int = 64
    ) -> MockBackend:
        return MockBackend(logits, slots, max_length)

    return make
