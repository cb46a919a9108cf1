"""The Engine protocol: all that an offline backend knows of the runtime below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from lite_runner.mindir.manifest import GraphName


class Engine(Protocol):
    """Runs the graphs of one artifact. Not to be used from several threads."""

    name: str  # lite, lite-worker or graph-cell; stands in result.json

    def bind(self, graph: GraphName, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
        """The input arrays of a graph, of these shapes, to be filled in place.

        They keep their contents and stay valid until the graph is bound to other shapes (it is
        resized then; binding it to the same shapes again gives the same arrays).
        """
        ...

    def run(self, graph: GraphName) -> list[NDArray[Any]]:
        """The outputs for what the bound arrays hold now; valid until the next run."""
        ...

    def close(self) -> None:
        """End what was started; calling it twice is harmless."""
        ...
