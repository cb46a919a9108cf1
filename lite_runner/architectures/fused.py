"""Where the rows of a tensor lie in the one that a checkpoint stores: fused, in another order."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from lite_runner.architectures.naming import Parameter
from lite_runner.architectures.spec import Decoder

if TYPE_CHECKING:  # functions import it: `run_lite.py --help` needs no NumPy
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

Rows: TypeAlias = "slice | NDArray[np.int64]"  # row i of a tensor is row rows[i] of the stored one
StoredRows: TypeAlias = "Callable[[Parameter, Decoder], Rows | None]"  # None: stored as it is


def apart(parameter: Parameter, model: Decoder) -> None:
    """Each tensor by itself, as it is."""


def stacked(parameter: Parameter, model: Decoder) -> slice | None:
    """All of q, then all of k, then all of v; all of gate, then all of up."""
    if parameter.part is None:
        return None
    if parameter.role in ("gate", "up"):
        sizes = [model.intermediate_size] * 2
    else:
        sizes = [heads * model.head_dim for heads in (model.num_heads, *[model.n_kv_heads] * 2)]
    start = sum(sizes[: parameter.part])
    return slice(start, start + sizes[parameter.part])


def by_head(parameter: Parameter, model: Decoder) -> NDArray[np.int64] | None:
    """q, k and v of each head; as many key/value heads as query heads."""
    import numpy as np

    if parameter.part is None:
        return None
    first = (3 * np.arange(model.num_heads) + parameter.part) * model.head_dim
    return (first[:, None] + np.arange(model.head_dim)).reshape(-1)


def interleaved(rows: StoredRows) -> StoredRows:
    """As `rows`, and the two of each rotation of q and k lie side by side."""

    def of(parameter: Parameter, model: Decoder) -> Rows | None:
        stored = rows(parameter, model)
        if parameter.role not in ("query", "key"):
            return stored
        heads = model.num_heads if parameter.role == "query" else model.n_kv_heads
        every = _numbers(slice(0, heads * model.head_dim) if stored is None else stored)
        pairs: NDArray[np.int64] = every.reshape(heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    return of


def rotated_first(rows: StoredRows) -> StoredRows:
    """As `rows`, and of a head of q or k the first `dims` are rotated, each d with d + dims / 2."""

    def of(parameter: Parameter, model: Decoder) -> Rows | None:
        import numpy as np

        stored, dims = rows(parameter, model), model.rotary and model.rotary.dims
        if parameter.role not in ("query", "key") or not dims:
            return stored
        heads = model.num_heads if parameter.role == "query" else model.n_kv_heads
        every = _numbers(slice(0, heads * model.head_dim) if stored is None else stored)
        first, second, rest = np.split(every.reshape(heads, -1), [dims // 2, dims], axis=1)
        before, behind = np.split(rest, 2, axis=1)
        ordered: NDArray[np.int64] = np.concatenate([first, before, second, behind], axis=1)
        return ordered.reshape(-1)

    return of


def _numbers(rows: Rows) -> NDArray[np.int64]:
    import numpy as np

    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
