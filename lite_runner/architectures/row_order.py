"""Orders of the rows of q, k and v in the tensors of checkpoints, for an architecture's
`stored_rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lite_runner.architectures import Rows, StoredRows
from lite_runner.architectures.naming import Parameter
from lite_runner.architectures.spec import Decoder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def by_head(parameter: Parameter, model: Decoder) -> NDArray[np.int64] | None:
    """Of each key/value head its query heads, k and v."""
    import numpy as np

    if parameter.part is None:
        return None
    group = model.num_heads // model.n_kv_heads
    places = np.arange(model.n_kv_heads * (group + 2)).reshape(-1, group + 2)
    heads = (places[:, :-2], places[:, -2:-1], places[:, -1:])[parameter.part]
    first = heads.reshape(-1, 1) * model.head_dim
    return (first + np.arange(model.head_dim)).reshape(-1)


def _rotated_heads(parameter: Parameter, model: Decoder) -> int:
    """The heads that a parameter has numbers of which are rotated; 0: of none."""
    role = parameter.role
    if role not in ("query", "key", "query_norm", "key_norm") or model.rotary is None:
        return 0
    attention = model.attention
    if role.endswith("_norm") and (attention.qk_norm_late or not attention.qk_norm_by_head):
        return 0
    if role.endswith("_norm") and not attention.qk_norm_apart:
        return 1
    return model.num_heads if role.startswith("query") else model.n_kv_heads


def interleaved(rows: StoredRows) -> StoredRows:
    """As `rows`, and the two of each rotation of q and k are adjacent."""

    def of(parameter: Parameter, model: Decoder) -> Rows | None:
        stored, heads = rows(parameter, model), _rotated_heads(parameter, model)
        if not heads:
            return stored
        every = _numbers(slice(0, heads * model.head_dim) if stored is None else stored)
        pairs: NDArray[np.int64] = every.reshape(heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    return of


def rotated_first(rows: StoredRows) -> StoredRows:
    """As `rows`, and of a head of q or k the first `dims` are rotated, each d with d + dims / 2."""

    def of(parameter: Parameter, model: Decoder) -> Rows | None:
        import numpy as np

        stored, dims = rows(parameter, model), model.rotary and model.rotary.dims
        heads = _rotated_heads(parameter, model)
        if not heads or not dims:
            return stored
        every = _numbers(slice(0, heads * model.head_dim) if stored is None else stored)
        first, second, rest = np.split(every.reshape(heads, -1), [dims // 2, dims], axis=1)
        before, behind = np.split(rest, 2, axis=1)
        ordered: NDArray[np.int64] = np.concatenate([first, before, second, behind], axis=1)
        return ordered.reshape(-1)

    return of


def _numbers(rows: Rows) -> NDArray[np.int64]:
    import numpy as np

    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
