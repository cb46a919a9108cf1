"""Changes of a request's scores that OpenAI's protocol has and MindFormers has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner.records import dataclass

Floats = NDArray[np.floating[Any]]


class Guide(Protocol):
    """Restricts one sequence to a grammar."""

    def mask(self, scores: Floats) -> None:
        """Set the scores [vocab] of tokens that may not come next to -inf, in place."""

    def take(self, token: int) -> None:
        """The next token."""


@dataclass(frozen=True)
class Adjustments:
    """What is added to the scores of a request's sequences. The penalties are of tokens that were
    generated, not of the prompt's."""

    presence_penalty: float = 0.0  # taken off once
    frequency_penalty: float = 0.0  # taken off for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    guide: Callable[[], Guide] | None = None  # makes one for each sequence


class Adjuster:
    """Adjusts the scores of one sequence."""

    def __init__(self, adjustments: Adjustments) -> None:
        self._presence = np.float32(adjustments.presence_penalty)
        self._frequency = np.float32(adjustments.frequency_penalty)
        self._counts: dict[int, int] = {}  # of generated tokens, where there are penalties
        bias = dict(adjustments.logit_bias)
        self._biased = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self._guide = None if adjustments.guide is None else adjustments.guide()

    def apply(self, logits: Floats) -> Floats:
        """Adjusted logits [vocab]; `logits` stay as they are."""
        scores = logits.copy()
        scores[self._biased] += self._bias
        if self._counts:
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            scores[ids] -= self._presence + self._frequency * counts
        if self._guide is not None:
            self._guide.mask(scores)
        return scores

    def take(self, token: int) -> None:
        """The token that was chosen."""
        if self._presence or self._frequency:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._guide is not None:
            self._guide.take(token)
