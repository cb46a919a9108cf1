"""Where the rows of a tensor lie in the one that a checkpoint stores: fused, in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.naming import Parameter
from lite_runner.architectures.spec import Decoder

Rows: TypeAlias = slice | NDArray[np.int64]  # row i of a tensor is row rows[i] of the stored one
StoredRows: TypeAlias = Callable[[Parameter, Decoder], Rows | None]  # None: stored as it is


def stacked(parameter: Parameter, model: Decoder) -> Rows | None:
    """All of q, then all of k, then all of v."""
    if parameter.part is None:
        return None
    queries, keys = (heads * model.head_dim for heads in (model.num_heads, model.n_kv_heads))
    start = (0, queries, queries + keys)[parameter.part]
    return slice(start, start + (keys if parameter.part else queries))


def by_head(parameter: Parameter, model: Decoder) -> NDArray[np.int64] | None:
    """q, k and v of each head; as many key/value heads as query heads."""
    if parameter.part is None:
        return None
    first = (3 * np.arange(model.num_heads) + parameter.part) * model.head_dim
    return (first[:, None] + np.arange(model.head_dim)).reshape(-1)
