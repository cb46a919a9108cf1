"""Where logits that are NaN or infinite come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from lite_runner.config.ranks import Ranks
from lite_runner.errors import NonFiniteError, RunnerError
from lite_runner.model.files import ModelFiles
from lite_runner.weights.tensor import CHUNK, widened


@contextmanager
def explained_nonfinite(files: ModelFiles, ranks: Ranks | None = None) -> Iterator[None]:
    """Add to a NonFiniteError the first of the model's weights that is not finite, which names its
    layer, or that all of them are: then it is the computation that overflows."""
    try:
        yield
    except NonFiniteError as error:
        if files.exported is not None:  # an export, whose weights are inside of its graphs
            raise
        try:
            name = _first_nonfinite(files, ranks)
        except RunnerError:
            raise error from None
        if name is None:
            cause, hint = "all weights are finite, so it overflows on the way", error.hint
        else:
            cause, hint = f"{name} of the checkpoint is not finite", "fetch or convert it again"
        raise NonFiniteError(f"{error.message}: {cause}", hint) from error


def _first_nonfinite(files: ModelFiles, ranks: Ranks | None) -> str | None:
    for name, tensor in files.tensors(ranks).items():
        if not all(np.isfinite(widened(chunk)).all() for chunk in tensor.chunks(CHUNK)):
            return name
    return None
