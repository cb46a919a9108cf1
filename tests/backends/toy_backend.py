"""A backend: of every token the next one follows. tests/backends/test_init.py adds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import Backend, BackendInfo, Row, RunOptions, Seat
from lite_runner.model import ModelFiles
from lite_runner.sizing import Memory


class ToyBackend:
    """See Backend."""

    adapters, compile_s = None, 0.0

    def __init__(self, info: BackendInfo) -> None:
        self.info = info

    def prepare(self) -> None:
        pass

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        known = np.concatenate([row.tokens[len(row.tokens) - row.logits :] for row in rows])
        return np.eye(self.info.vocab_size, dtype=np.float32)[known + 1]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


class Toy(Seat):
    """See Seat."""

    def unsupported(self, files: ModelFiles, options: RunOptions) -> list[str]:
        return ["it knows no adapters"] if options.adapters else []

    def memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        return Memory(weights=0, cache=0, process=1)

    def describe(self, files: ModelFiles, options: RunOptions) -> str:
        return "counting"

    def dtype(self, files: ModelFiles, options: RunOptions) -> str:
        return "nothing"

    def open(self, files: ModelFiles, options: RunOptions) -> Backend:
        sizes = (files.model.vocab_size, options.slots, options.length)
        return ToyBackend(BackendInfo("counting", *sizes, budget=options.length, chunk=1))


SEAT = Toy()
