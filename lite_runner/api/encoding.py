"""Token ids as callers give and want them: lists, arrays and MindSpore's tensors; padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import show
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass


def as_arrays(values: Any) -> Any:
    """`values`, a tensor as an array."""
    return values.asnumpy() if hasattr(values, "asnumpy") else values


def rows_of(input_ids: Any, model: Decoder, pad_token_id: int | None = None) -> list[list[int]]:
    """Rows of ids, one for a flat list, without padding at the end.

    `pad_token_id`: what they were padded with; None: the model's. Raises ConfigError for what is no
    id of the model.
    """
    values = as_arrays(input_ids)
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise ConfigError(f"input_ids: got {show(input_ids)}, expected a list of token ids")
    flat = len(values) > 0 and np.ndim(as_arrays(values[0])) == 0
    given = [values] if flat else [as_arrays(row) for row in values]
    rows = [[_token(id) for id in row] for row in given]
    pad = model.pad_token_id if pad_token_id is None else pad_token_id
    for index, row in enumerate(rows):
        wrong = next((id for id in row if not 0 <= id < model.vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"input_ids[{index}]: got the id {wrong}, expected 0 to {model.vocab_size - 1}",
                "use the model's own tokenizer",
            )
        while row and row[-1] == pad:
            row.pop()
    return rows


def _token(id: Any) -> int:
    if isinstance(id, bool) or not isinstance(id, (int, np.integer)):
        raise ConfigError(f"input_ids: got {show(id)}, expected token ids")
    return int(id)


_NO_PADDING = (False, None, "do_not_pad")
_TRUNCATES: dict[Any, bool] = {
    **dict.fromkeys((False, None, "do_not_truncate"), False),
    **dict.fromkeys((True, "longest_first", "only_first"), True),
}


class BatchEncoding(dict[str, Any]):
    """A tokenizer's result: a dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the encoding has no {name!r}, but {', '.join(self)}")


@dataclass(frozen=True)
class Padding:
    """Truncation and padding of rows to a batch."""

    max_length: int | None
    padding: Any
    truncation: Any
    pad: int | None  # token id
    side: str  # right or left
    source: str  # the tokenizer, for messages

    def rows(self, rows: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids and attention masks. Raises ConfigError where the rows do not fit."""
        if self.truncation not in _TRUNCATES:
            raise ConfigError(
                f"truncation: got {self.truncation!r}, expected True, False, 'longest_first' or"
                " 'only_first'"
            )
        if _TRUNCATES[self.truncation] and self.max_length is not None:
            rows = [row[: self.max_length] for row in rows]
        width = self._width(max(map(len, rows), default=0))
        if self.pad is None and any(len(row) < width for row in rows):
            raise ConfigError(f"{self.source} names no token to pad with")
        missing = [max(0, width - len(row)) for row in rows]
        ids, masks = [], []
        for row, count in zip(rows, missing, strict=True):
            mask, masked = [1] * len(row), [0] * count
            padding = [self.pad or 0] * count
            left = self.side == "left"
            ids.append([*padding, *row] if left else [*row, *padding])
            masks.append([*masked, *mask] if left else [*mask, *masked])
        return ids, masks

    def _width(self, longest: int) -> int:
        """The length to pad to; 0: no padding."""
        if self.padding in _NO_PADDING:
            return 0
        if self.padding in (True, "longest"):
            return longest
        if self.padding != "max_length":
            raise ConfigError(
                f"padding: got {self.padding!r}, expected True, False, 'longest' or 'max_length'"
            )
        if self.max_length is None:
            raise ConfigError("padding='max_length' needs a max_length", "max_length=512")
        if longest > self.max_length:
            raise ConfigError(
                f"max_length: got {self.max_length}, but a text has {longest} tokens",
                "truncation=True cuts it",
            )
        return self.max_length


def as_tensors(values: dict[str, Any], kind: Any) -> BatchEncoding:
    """Lists [texts, n] as int32 arrays ("np") or MindSpore's tensors ("ms").

    Raises ConfigError for lists that make no array.
    """
    kind = getattr(kind, "value", kind)  # MindFormers' TensorType
    if kind not in ("np", "ms"):
        raise ConfigError(f"return_tensors: got {kind!r}, expected 'ms', 'np' or None")
    if len({len(row) for row in values["input_ids"]}) > 1:
        raise ConfigError("texts of several lengths make no array", "padding=True")
    arrays = {name: np.array(value, np.int32) for name, value in values.items()}
    if kind == "np":
        return BatchEncoding(arrays)
    from mindspore import Tensor  # only those who want one pay for it

    return BatchEncoding({name: Tensor(array) for name, array in arrays.items()})
