"""The Engine protocol between the backends of exported models and their runtimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from lite_runner.mindir.manifest import GraphName


class Engine(Protocol):
    """Runs the graphs of one artifact; not thread-safe."""

    name: str  # lite, lite-worker or graph-cell; as in result.json

    def bind(self, graph: GraphName, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
        """The input arrays of a graph, of these shapes, to be filled in place.

        They keep their contents, and stay valid until the graph is bound to other shapes, which
        resizes it. Binding to the same shapes returns the same arrays.
        """
        ...

    def run(self, graph: GraphName) -> list[NDArray[Any]]:
        """The outputs for the current contents of the bound arrays; valid until the next run."""
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...
