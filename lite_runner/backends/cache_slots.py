"""Slots of the caches that are parameters of a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from mindspore import Parameter, Tensor, ops


def copy_slots(
    caches: Iterable[Parameter], slots: int, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Slot targets[i] becomes slot sources[i]; all are read before any is written.

    The first axis of each cache goes by slots, of which it holds `slots`.
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
