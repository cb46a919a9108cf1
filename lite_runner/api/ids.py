"""Token ids as callers give them: lists, arrays and MindSpore's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import show
from lite_runner.errors import ConfigError


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
