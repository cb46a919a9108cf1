"""Extracts logits from the outputs of an exported graph; MindFormers' graphs return tuples.

Shapes: b rows, V vocabulary, s positions that a graph may return instead of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import Row
from lite_runner.errors import ArtifactError


def logits_of(
    outputs: Sequence[NDArray[Any]], rows: int, vocab: int, last: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Logits [b, V] after each row's last token, at position `last` [b].

    They are the first float output [b, V], [b, 1, V], [b, s, V] or [b * s, V]; else the argmax
    token of a sampled graph, int32 [b], [b, 1] or [b * s, 1], becomes one-hot logits. Raises
    ArtifactError if there is neither.
    """
    for output in outputs:
        if output.dtype.kind == "f" and output.ndim > 1 and output.shape[-1] == vocab:
            logits = output.reshape(rows, -1, vocab)
            chosen: NDArray[np.float32] = logits[
                np.arange(rows), _last_index(logits.shape[1], last)
            ]
            return chosen.astype(np.float32)
    for output in outputs:
        if output.dtype.kind == "i" and output.size % rows == 0:
            tokens = output.reshape(rows, -1)
            token = tokens[np.arange(rows), _last_index(tokens.shape[1], last)]
            return np.equal(token[:, None], np.arange(vocab)).astype(np.float32)
    got = ", ".join(f"{output.dtype} {list(output.shape)}" for output in outputs)
    raise ArtifactError(f"the graph returns {got}, expected logits of {vocab} tokens, or tokens")


def select_wanted(logits: NDArray[np.float32], rows: Sequence[Row]) -> NDArray[np.float32]:
    """The logits [k, V] that the rows ask for, of those after each row's last token [rows, V]."""
    wanted = [index for index, row in enumerate(rows) if row.logits]
    return logits if len(wanted) == len(rows) else logits[wanted]


def _last_index(positions: int, last: NDArray[np.int32]) -> NDArray[np.int32]:
    """Index of each row's last position among the graph's `positions`."""
    return np.minimum(last, positions - 1)
