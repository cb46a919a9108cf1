"""Log-probabilities of tokens, and of the most likely ones, from logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import Backend, Row
from lite_runner.generation.request import Completion, Logprobs

BLOCK_BYTES = 8 << 20  # logits processed at a time, to stay in the CPU cache


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


def logits_of_text(backend: Backend, tokens: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
    """Base-model logits after each of `tokens` [n], in chunks [k, vocab], from a backend with
    `most_logits`. Overwrites slot 0."""
    step = backend.info.most_logits
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        yield backend.forward([Row(0, part, start, logits=len(part), length=len(tokens))])


def log_likelihoods(
    logits: NDArray[np.float32], following: NDArray[np.int32], top: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]:
    """Natural log-softmax of logits [n, vocab] at the tokens `following` [n]; and ids [n, k] and
    log-probabilities [n, k] of the `top` k tokens, most likely first.

    Max subtraction and exp are float32, the sum is float64. Non-finite logits give NaN. Memory is
    bounded by a block.
    """
    count, vocab = logits.shape
    top = min(top, vocab)
    found, ids, best = np.empty(count), np.empty((count, top), np.int32), np.empty((count, top))
    step = max(1, BLOCK_BYTES // (4 * vocab))
    for start in range(0, count, step):
        here = slice(start, start + step)
        block = logits[here]
        with np.errstate(invalid="ignore"):  # inf - inf
            shifted = block - block.max(axis=1, keepdims=True)
        chosen = np.take_along_axis(shifted, following[here, None], axis=1)
        if top:
            ids[here] = _largest(shifted, top)
            best[here] = np.take_along_axis(shifted, ids[here], axis=1)
        total = np.log(np.exp(shifted, out=shifted).sum(axis=1, dtype=np.float64))
        found[here] = chosen[:, 0] - total
        best[here] -= total[:, None]
    return found, ids, best


def _largest(block: NDArray[np.float32], top: int) -> NDArray[np.int64]:
    """Indices [n, top] of the `top` largest per row, largest first; ties by index."""
    least = np.partition(block, -top, axis=1)[:, -top]
    found = np.empty((len(block), top), np.int64)
    for index, row in enumerate(block):
        near = np.flatnonzero(~(row < least[index]))  # more than `top` on ties
        found[index] = near[np.argsort(-row[near], kind="stable")[:top]]
    return found
