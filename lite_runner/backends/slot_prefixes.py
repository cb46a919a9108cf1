"""Where the prefixes end of the prompts that a backend has in its cache slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.prefix import PromptPrefix
from lite_runner.architectures.spec import Prefix
from lite_runner.backends.base import Row


class SlotPrefixes:
    """The prefix of the prompt in each slot, as part of its cache."""

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self._of: dict[int, PromptPrefix] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        """Record the prompts that begin among the rows, each being there as a whole."""
        for row in rows:
            if row.position == 0:
                self._of[row.slot] = PromptPrefix.of(self._prefix, row.tokens)

    def of(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Length and mask position of the prefix [n] in each of the slots [n]."""
        found = [self._of.get(int(slot), PromptPrefix()) for slot in slots]
        lengths = np.array([one.length for one in found], np.int64)
        return lengths, np.array([one.mask for one in found], np.int64)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]; all are read before any is written."""
        copied = [self._of.get(source, PromptPrefix()) for source in sources]
        self._of |= dict(zip(targets, copied, strict=True))
