"""The KV cache of a network, kept in its parameters: copying slots, and freeing its memory.

Two of MindSpore's references would keep the memory of a closed network: a reference cycle between a
parameter and its C++ description, invisible to Python's garbage collector, and the compiler's
reference to the last network's parameters. Compiled graphs themselves stay: see
PreTrainedModel.close.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.graph.api import _cell_graph_executor


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


def break_cycles(network: nn.Cell) -> None:
    """Break the reference cycles of a network's parameters."""
    for parameter in network.get_parameters():
        parameter.param_info.obj = None


def release_memory() -> None:
    """Release the memory of networks that were closed or resized."""
    _cell_graph_executor._graph_executor.set_weights_values({})
    # malloc's mmap threshold is dynamic: large arrays may be in the heap too.
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # not in musl
        trim(0)
