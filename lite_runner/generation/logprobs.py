"""Log-probabilities of tokens: of chosen ones as they come, and of a prompt's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.likelihood import log_likelihoods
from lite_runner.generation.request import Completion, Logprobs


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


def logprobs_of(completion: Completion) -> list[dict[str, Any]] | None:
    """Those of its drawn tokens as JSON takes them: each with its id, its log-probability (None
    where that is not finite), and [id, log-probability] of the most likely ones at its place."""
    found = completion.logprobs
    return None if found is None else _plain(found, completion.drawn)


def prompt_logprobs_of(
    completion: Completion, prompt: Sequence[int]
) -> list[dict[str, Any] | None] | None:
    """The same of the prompt's tokens, as far as they were computed; None for the first, which
    nothing foretells."""
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
