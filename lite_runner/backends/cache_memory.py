"""Returns a network's memory to the system when it is closed.

Two of MindSpore's references would keep it: a reference cycle between a parameter and its C++
description, invisible to Python's garbage collector, and the compiler's reference to the last
network's parameters. Compiled graphs themselves stay: see PreTrainedModel.close.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from mindspore import nn
from mindspore.graph.api import _cell_graph_executor


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
