"""What a network holds goes back to the system when the network goes.

Two of MindSpore's own references would keep it: a parameter and its description hold each other
where Python's collector cannot see it, and the compiler holds the parameters of the last network
that it saw. What MindSpore makes of a graph itself stays: see PreTrainedModel.close.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from mindspore import nn
from mindspore.graph.api import _cell_graph_executor


def untie(network: nn.Cell) -> None:
    """Let the parameters of a network go with it."""
    for parameter in network.get_parameters():
        parameter.param_info.obj = None


def give_back() -> None:
    """To be called when networks have gone, or parts of them."""
    _cell_graph_executor._graph_executor.set_weights_values({})
    # Large arrays lie in the heap too once one of them was freed: malloc's threshold follows them.
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # musl has none, and needs none
        trim(0)
