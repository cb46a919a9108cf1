"""Log-probabilities of following tokens, and of the most likely ones, from logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import Backend, Row

BLOCK_BYTES = 8 << 20  # logits processed at a time, to stay in the CPU cache


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
