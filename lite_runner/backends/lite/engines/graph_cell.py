"""MindSpore's own MindIR runtime as an engine, where there is no MindSpore Lite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from lite_runner.backends.mindspore.device import set_device
from lite_runner.errors import ArtifactError, first_line
from lite_runner.mindir.manifest import Graph, GraphName
from lite_runner.mindir.skim import has_custom_operators
from lite_runner.system import memory
from lite_runner.system.signals import deferred

if TYPE_CHECKING:
    from lite_runner.backends.lite.engine import EngineOptions

AGAIN = "export the model again with the MindSpore of this machine"


class GraphCellEngine:
    """See `lite_runner.backends.lite.engine.GraphEngine`.

    Parameters of the same name are one in all graphs, so that an increment finds the cache that
    its prefill has filled. Loading a pair takes its weights' memory twice; half of it is free
    again afterwards, but glibc mostly keeps it for the process.
    """

    name = "graph-cell"

    def __init__(
        self,
        graphs: Mapping[GraphName, Path],
        specs: Mapping[GraphName, Graph],
        options: EngineOptions,
        producer: str = "",
    ) -> None:
        """Load all graphs. `producer`: the MindSpore that wrote them.

        Raises ArtifactError for a file that is missing or broken, of another MindIR version, or
        encrypted with another key.
        """
        set_device(options.device, options.device_id, options.threads)
        self._paths, self._specs, self._producer = graphs, specs, producer
        self._cells: dict[GraphName, nn.GraphCell] = {}
        self._bound: dict[GraphName, list[NDArray[Any]]] = {}
        self._compiled: set[GraphName] = set()
        held: dict[str, ms.Parameter] = {}
        for graph, path in graphs.items():
            try:
                cell = _cell(path, options.key)
            except ArtifactError as error:
                raise self._of_release(error) from error
            for name, parameter in cell.parameters_dict().items():
                if (first := held.setdefault(name, parameter)) is not parameter:
                    _share(parameter, first, path)
            self._cells[graph] = cell

    def bind(self, graph: GraphName, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
        """The input arrays of a graph, of these shapes, to be filled in place."""
        bound = self._bound.get(graph, [])
        if [array.shape for array in bound] != list(shapes):
            inputs = self._specs[graph].inputs
            bound = [np.zeros(one, spec.dtype) for one, spec in zip(shapes, inputs, strict=True)]
            self._bound[graph] = bound
        return bound

    def run(self, graph: GraphName) -> list[NDArray[Any]]:
        """The outputs for the contents of the bound arrays; the first run of a graph compiles it.

        Raises ArtifactError where the graph does not take these inputs.
        """
        # Copies: MindSpore may keep a tensor on its device, where a later change goes unseen.
        inputs = [Tensor(array) for array in self._bound[graph]]
        first = graph not in self._compiled
        try:
            with deferred() if first else nullcontext():  # interrupted, it leaves a dump
                outputs = self._cells[graph](*inputs)
        except (RuntimeError, TypeError, ValueError) as error:
            if (lacking := memory.shortage_error(error)) is not None:
                raise lacking from error
            raise self._of_release(
                ArtifactError(
                    f"{self._paths[graph]}: MindSpore {ms.__version__} cannot run it: "
                    f"{first_line(error)}",
                    AGAIN,
                )
            ) from error
        self._compiled.add(graph)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return [output.asnumpy() for output in outputs]

    def _of_release(self, error: ArtifactError) -> ArtifactError:
        """The error, with an explanation where another release wrote the graphs."""
        if self._producer in ("", ms.__version__):
            return error
        message = f"{error.message} (MindSpore {self._producer} wrote it)"
        return ArtifactError(message, f"MindSpore Lite of that release may run it; else {AGAIN}")

    def close(self) -> None:
        """Release the graphs, and their memory with them."""
        self._cells.clear()
        self._bound.clear()


def _cell(path: Path, dec_key: bytes | None) -> nn.GraphCell:
    """The graph of a MindIR. Raises ArtifactError for one that calls operators of others."""
    if has_custom_operators(path):
        raise ArtifactError(
            f"{path}: contains custom operators, whose code would be loaded from a library that the"
            " file names",
            "export the model with MindSpore's own operators",
        )
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file", "export the model again")
    key = {} if dec_key is None else {"dec_key": dec_key, "dec_mode": "AES-GCM"}
    try:
        return nn.GraphCell(ms.load(str(path), **key))
    except (RuntimeError, ValueError) as error:
        if (lacking := memory.shortage_error(error)) is not None:
            raise lacking from error
        reason = first_line(error)
        if "may be encrypted" in reason:
            given = "without a key" if dec_key is None else "with this key"
            raise ArtifactError(
                f"{path}: it is encrypted, and does not open {given}",
                "give the key that it was exported with (enc_key)",
            ) from error
        if dec_key is not None and reason.startswith("Load MindIR failed"):
            raise ArtifactError(
                f"{path}: a key was given, but this is not a MindIR encrypted with AES-GCM",
                "omit the key, or " + AGAIN,
            ) from error
        raise ArtifactError(
            f"{path}: MindSpore {ms.__version__} cannot load it: {reason}", AGAIN
        ) from error


def _share(parameter: ms.Parameter, first: ms.Parameter, path: Path) -> None:
    """Let a Parameter live in another's memory."""
    if (parameter.shape, parameter.dtype) != (first.shape, first.dtype):
        raise ArtifactError(
            f"{path}: {parameter.name} is {parameter.dtype} {parameter.shape}, but "
            f"{first.dtype} {first.shape} in the other graph: these are not of one export",
            "export both graphs together",
        )
    parameter.set_data(first)
