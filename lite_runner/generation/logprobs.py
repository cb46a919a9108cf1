"""Log-probabilities of tokens: of chosen ones as they come, and of a prompt's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.likelihood import log_likelihoods
from lite_runner.generation.request import Logprobs


class Places:
    """Gathers those of one text, place by place."""

    def __init__(self, top: int) -> None:
        """`top`: how many of the most likely tokens are wanted at each place."""
        self._top = top
        self._parts: list[tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]] = []

    def add(self, logits: NDArray[np.float32], tokens: NDArray[np.int32]) -> None:
        """`tokens` [n] stand where `logits` [n, vocab] foretell them."""
        self._parts.append(log_likelihoods(logits, tokens, self._top))

    def all(self) -> Logprobs:
        """Those of all tokens so far."""
        if not self._parts:
            none = np.zeros((0, self._top))
            return Logprobs(np.zeros(0), none.astype(np.int32), none)
        chosen, ids, top = zip(*self._parts, strict=True)
        return Logprobs(np.concatenate(chosen), np.concatenate(ids), np.concatenate(top))
