"""Log-probabilities of generated tokens and of prompt tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.likelihood import log_likelihoods
from lite_runner.generation.request import Completion, Logprobs


class LogprobCollector:
    """Collects the log-probabilities of one sequence."""

    def __init__(self, top: int) -> None:
        """`top`: number of most likely tokens to keep per position."""
        self._top = top
        self._parts: list[tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]] = []

    def add(self, logits: NDArray[np.float32], tokens: NDArray[np.int32]) -> Logprobs:
        """Those of `tokens` [n], which `logits` [n, vocab] predict."""
        part = log_likelihoods(logits, tokens, self._top)
        self._parts.append(part)
        return Logprobs(*part)

    def all(self) -> Logprobs:
        """The log-probabilities of all tokens so far."""
        if not self._parts:
            none = np.zeros((0, self._top))
            return Logprobs(np.zeros(0), none.astype(np.int32), none)
        chosen, ids, top = zip(*self._parts, strict=True)
        return Logprobs(np.concatenate(chosen), np.concatenate(ids), np.concatenate(top))


def logprobs_of(completion: Completion) -> list[dict[str, Any]] | None:
    """JSON form for the drawn tokens: id, log-probability (None if not finite), and [id,
    log-probability] of the most likely tokens at each position."""
    found = completion.logprobs
    return None if found is None else _plain(found, completion.drawn)


def prompt_logprobs_of(
    completion: Completion, prompt: Sequence[int]
) -> list[dict[str, Any] | None] | None:
    """The same for the prompt's tokens computed so far; None for the first, which nothing
    predicts."""
    found = completion.prompt_logprobs
    return None if found is None else [None, *_plain(found, prompt[1:])]


def _plain(found: Logprobs, tokens: Sequence[int]) -> list[dict[str, Any]]:
    parts = (part.tolist() for part in (found.chosen, found.top_ids, found.top))
    return [
        {
            "token": int(token),
            "logprob": _finite(chosen),
            "top": [[id, _finite(value)] for id, value in zip(ids, values, strict=True)],
        }
        for token, chosen, ids, values in zip(tokens, *parts, strict=False)
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
