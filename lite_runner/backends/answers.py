"""What a graph answers, whatever else it gives besides: MindFormers' end in tuples.

Shapes: b rows, V the vocabulary, s positions that a graph may answer for in place of the last.
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
    """Logits [b, V] after each row's last token, which is at its position `last` [b].

    They are the first floats of V to a position, [b, V], [b, 1, V], [b, s, V] or [b * s, V]; else
    a graph has chosen the likeliest token itself, int32 [b], [b, 1] or [b * s, 1], whose logit is
    1, of all others 0. Raises ArtifactError for neither.
    """
    for output in outputs:
        if output.dtype.kind == "f" and output.ndim > 1 and output.shape[-1] == vocab:
            logits = output.reshape(rows, -1, vocab)
            chosen: NDArray[np.float32] = logits[np.arange(rows), _place(logits.shape[1], last)]
            return chosen.astype(np.float32)
    for output in outputs:
        if output.dtype.kind == "i" and output.size % rows == 0:
            tokens = output.reshape(rows, -1)
            token = tokens[np.arange(rows), _place(tokens.shape[1], last)]
            return np.equal(token[:, None], np.arange(vocab)).astype(np.float32)
    got = ", ".join(f"{output.dtype} {list(output.shape)}" for output in outputs)
    raise ArtifactError(f"the graph answers {got}, expected logits of {vocab} tokens, or tokens")


def wanted_of(logits: NDArray[np.float32], rows: Sequence[Row]) -> NDArray[np.float32]:
    """Of logits [rows, V] after each row's last token those that the rows want [k, V]."""
    wanted = [index for index, row in enumerate(rows) if row.logits]
    return logits if len(wanted) == len(rows) else logits[wanted]


def _place(positions: int, last: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where of so many positions each row's answer is."""
    return np.minimum(last, positions - 1)
