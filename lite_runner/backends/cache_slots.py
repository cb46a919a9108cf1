"""Copying slots of caches that are network parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from mindspore import Parameter, Tensor, ops


def copy_slots(
    caches: Iterable[Parameter], slots: int, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Copy slot sources[i] to targets[i]; all are read before any is written.

    The first axis of each cache is slot-major, with `slots` slots.
    """
    update, gather = ops.ScatterUpdate(), ops.Gather()
    for cache in caches:
        height = cache.shape[0] // slots
        span = np.arange(height, dtype=np.int32)
        read, write = (
            Tensor((np.array(chosen, np.int32)[:, None] * height + span).reshape(-1))
            for chosen in (sources, targets)
        )
        update(cache, write, gather(cache, read, 0))
