"""Embeddings: hidden states of a prompt, pooled while it is prefilled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lite_runner.config.generation import FinishReason
from lite_runner.errors import RunnerError
from lite_runner.generation.request import Completion, Event, Finished, Request
from lite_runner.generation.sampling import nonfinite_hidden


class Pooled:
    """The mean, or the last, of a prompt's hidden states. A `DecodingStrategy` without tokens."""

    width = 1

    def __init__(self, id: int, request: Request) -> None:
        self._id, self._request, self._done = id, request, False
        self._sum: NDArray[np.float64] | None = None

    def add(self, hidden: NDArray[np.float32]) -> None:
        """Hidden states [n, hidden_size] of the next tokens; of the last one alone where the others
        are not pooled."""
        found = hidden.sum(axis=0, dtype=np.float64)
        self._sum = found if self._sum is None else self._sum + found

    def restart(self) -> None:
        """Reset: the prompt is prefilled from its start again."""
        self._sum = None

    def begin(self, logits: NDArray[np.float32]) -> list[Event]:
        """The embedding, once all tokens are there."""
        assert self._sum is not None
        if not np.isfinite(self._sum).all():
            return [*self._finished("error", nonfinite_hidden(self._request.name))]
        tokens = len(self._request.prompt) if self._request.pooling == "mean" else 1
        (ended,) = self._finished("stop")
        embedding = (self._sum / tokens).astype(np.float32)
        return [replace(ended, completion=replace(ended.completion, embedding=embedding))]

    def tokens(self) -> list[tuple[int, list[int]]]:
        return []

    def drafts(self, most: Callable[[float], int]) -> list[list[int]]:
        return []

    def advance(
        self, logits: NDArray[np.float32], drafts: Sequence[Sequence[int]]
    ) -> tuple[list[Event], list[tuple[int, int]]]:
        """No effect: it ends with the prompt."""
        return [], []

    def running(self) -> list[int]:
        """The prompt's, until it is over."""
        return [] if self._done else [0]

    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]:
        """End it without an embedding."""
        return [] if self._done else self._finished(reason)

    def _finished(self, reason: FinishReason, error: RunnerError | None = None) -> list[Finished]:
        self._done = True
        return [Finished(self._id, Completion(self._id, 0, [], reason), error)]


def first_numbers(
    embedding: NDArray[np.float32], count: int, *, normalize: bool
) -> NDArray[np.float32]:
    """The first `count` numbers of an embedding, divided by their length where it is to be 1."""
    found = embedding[:count]
    length = np.linalg.norm(found) if normalize else 0.0
    return found / np.float32(length) if length else found
