"""From logits to the log-likelihood of the token that follows, for any backend that scores."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 8 << 20  # logits worked on at a time: they stay in the processor's cache
LOGITS_BYTES = 64 << 20  # logits that a backend makes at a time


def rows_at_once(vocab: int, longest: int) -> int:
    """Tokens whose logits [n, vocab] a backend makes in one step: a power of two, or `longest`."""
    fits = max(1, LOGITS_BYTES // (4 * vocab))
    return min(longest, 1 << (fits.bit_length() - 1))


def log_likelihoods(
    logits: NDArray[np.float32], following: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Natural log-softmax of logits [n, vocab] at the tokens `following` [n] -> [n].

    The largest logit is subtracted and exp taken in float32; the sum is float64. Logits that are
    not finite give NaN, and a vocabulary never takes more than one block of memory.
    """
    count, vocab = logits.shape
    found = np.empty(count)
    step = max(1, BLOCK_BYTES // (4 * vocab))
    for start in range(0, count, step):
        block = logits[start : start + step]
        best = block.max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # inf - inf
            shifted = block - best
        chosen = np.take_along_axis(shifted, following[start : start + step, None], axis=1)
        total = np.exp(shifted, out=shifted).sum(axis=1, dtype=np.float64)
        found[start : start + step] = chosen[:, 0] - np.log(total)
    return found


def log_likelihoods_of(
    parts: Iterable[NDArray[np.float32]], following: NDArray[np.int32]
) -> NDArray[np.float64]:
    """The same for the logits of a whole text, in parts [k, vocab] that together are [n, vocab]."""
    found: list[NDArray[np.float64]] = []
    start = 0
    for logits in parts:
        found.append(log_likelihoods(logits, following[start : start + len(logits)]))
        start += len(logits)
    return np.concatenate(found)
