"""A backend with known logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import BackendInfo, Row


class FakeBackend:
    """Logit t after a token at place p is -t * (1 + p / 1000).

    `faults`: what happens in a window, by its number; a number is added to all logits but the
    first.
    """

    info = BackendInfo("fake", 1000, 1, 1000, 1000, chunk=1, most_logits=1000)
    adapters, compile_s = None, 0.0

    def __init__(self, faults: dict[int, BaseException | float] | None = None) -> None:
        self.errors = faults or {}
        self.windows = 0

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        (row,) = rows
        assert (row.position, row.logits) == (0, len(row.tokens))
        fault = self.errors.get(self.windows, 0.0)
        self.windows += 1
        if isinstance(fault, BaseException):
            raise fault
        logits = logits_of_positions(len(row.tokens))
        logits[:, 1:] += fault
        return logits

    def prepare(self) -> None: ...
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...
    def close(self) -> None: ...


def logits_of_positions(tokens: int) -> NDArray[np.float32]:
    """The fake's logits after tokens 0 .. n - 1 of a window [n, vocab]."""
    return np.outer(1 + np.arange(tokens) / 1000, -np.arange(1000)).astype(np.float32)
