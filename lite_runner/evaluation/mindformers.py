"""The likelihood of a text by MindFormers' own network."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from lite_runner import progress
from lite_runner.plan.open_mindformers import OpenMindFormers

if TYPE_CHECKING:
    from numpy.typing import NDArray


class MindFormersScorer:
    """MindFormers in its process. See Scorer."""

    def __init__(self, opened: OpenMindFormers) -> None:
        self._opened = opened
        self.engine = opened.engine
        self.compile_s = 0.0

    def log_likelihoods(self, ids: NDArray[np.int32]) -> NDArray[np.float64]:
        if not self.compile_s:
            began = time.perf_counter()
            with progress.step("compile"):
                self._score(ids)
            self.compile_s = time.perf_counter() - began
        return self._score(ids)

    def close(self) -> None:
        self._opened.close()

    def _score(self, ids: NDArray[np.int32]) -> NDArray[np.float64]:
        return np.array(self._opened.process.score(ids.tolist(), self._opened.run.unused))
