"""MindSpore Lite in a process of its own, with the public wheel: the worker engine.

Tensors are in shared memory (memfd_create: unnamed, so nothing is left behind, and not limited by
/dev/shm, which is small in containers). Only names, shapes and offsets go through the pipes.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.lite.engines import lite_release
from lite_runner.backends.lite.engines.lite_release import LITE
from lite_runner.backends.workers.process import WorkerProcess
from lite_runner.backends.workers.python import worker_command
from lite_runner.errors import ArtifactError, EnvironmentFault, RunnerError
from lite_runner.mindir.manifest import AGAIN, GraphName, TensorSpec
from lite_runner.records import dataclass
from lite_runner.system import environment

# Timeouts for a hang, not for a large model on a busy machine.
START_SECONDS = 300.0
LOAD_SECONDS = 3600.0
RUN_SECONDS = 3600.0

ALIGNMENT = 64  # bytes; a cache line, for vector instructions


class _Memory:
    """Memory shared with the worker. It never shrinks, since there may be views of it."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name)
        self._map: mmap.mmap | None = None

    def view(self, shape: tuple[int, ...], dtype: str, offset: int) -> NDArray[Any]:
        """The array at an offset. Raises ValueError if it is outside the memory."""
        kind = np.dtype(dtype)
        end = offset + math.prod(shape) * kind.itemsize
        if kind.hasobject or offset < 0 or min(shape, default=1) < 0:
            raise ValueError(f"{dtype}{list(shape)} at {offset}")
        if self._map is None or end > len(self._map):
            size = os.fstat(self.descriptor).st_size
            if end > size:
                raise ValueError(f"{dtype}{list(shape)} at {offset} in {size} bytes")
            self._map = mmap.mmap(self.descriptor, size)
        return np.ndarray(shape, kind, self._map, offset)

    def grow(self, size: int) -> None:
        """Grow to at least `size` bytes. Raises OSError if that fails."""
        if self.descriptor < 0:
            raise RunnerError("the MindSpore Lite worker was already closed")
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)

    def close(self) -> None:
        """Views stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass
class _Graph:
    """A graph of the worker, as this side knows it."""

    path: Path
    inputs: _Memory
    outputs: _Memory
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # currently bound; none at first
    arrays: list[NDArray[Any]] = field(default_factory=list)
    results: list[NDArray[Any]] = field(default_factory=list)  # of the last run


class WorkerEngine:
    """See GraphEngine; runs MindSpore Lite 2.0.0 on CPU. `inputs`: the inputs of each graph.

    Bound arrays have Lite's dtypes (int32 where a graph was exported with int64), and start as
    zeros.
    """

    name = "lite-worker"

    def __init__(
        self, graphs: Mapping[GraphName, Path], *, threads: int | None, python: Path | None = None
    ) -> None:
        """Start the process and load the graphs, .mindir or .ms, with one context each.

        `threads` None: one per processor available to this process; `python` None: found by
        LITE.find(). Raises EnvironmentFault if Lite is unavailable or too old for a file,
        ArtifactError for a file that it rejects.
        """
        found = LITE.find() if python is None else python
        for path in graphs.values():
            if not path.is_file():
                raise ArtifactError(f"{path}: no such file", AGAIN)
        self._graphs: dict[GraphName, _Graph] = {
            name: _Graph(path.resolve(), _Memory(f"{name}-in"), _Memory(f"{name}-out"))
            for name, path in graphs.items()
        }
        memories = [memory for graph in self._graphs.values() for memory in _memories(graph)]
        try:
            self._process = WorkerProcess(
                LITE,
                worker_command(found, Path(__file__).with_name("lite_worker.py")),
                [memory.descriptor for memory in memories],
            )
        except BaseException:
            for memory in memories:
                memory.close()
            raise
        self.inputs: dict[GraphName, tuple[TensorSpec, ...]] = {}
        try:
            self._start(found)
            for name in graphs:
                self.inputs[name] = self._load(name, threads or environment.cores())
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def bind(self, graph: GraphName, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
        """See GraphEngine. Raises ArtifactError if the graph does not accept these shapes."""
        known = self._graphs[graph]
        wanted = [tuple(shape) for shape in shapes]
        if known.shapes == wanted:
            return known.arrays
        specs = self.inputs[graph]
        self._check_shapes(graph, wanted)
        offsets, size = _offsets(wanted, [spec.dtype for spec in specs])
        # Unbound until the worker has resized it; the memory of the old arrays is reused.
        known.shapes, known.arrays, known.results = [], [], []
        try:
            known.inputs.grow(size)
            places = zip(wanted, specs, offsets, strict=True)
            arrays = [known.inputs.view(shape, spec.dtype, at) for shape, spec, at in places]
        except OSError as error:
            raise EnvironmentFault(
                f"{size / 2**20:.0f} MiB for the inputs cannot be allocated: {error}"
            ) from error
        doing = f"resizing {known.path.name} to {wanted if len(wanted) < 5 else wanted[:4]}"
        answer = self._process.ask(
            {"op": "bind", "graph": graph, "shapes": wanted, "offsets": offsets, "size": size},
            seconds=LOAD_SECONDS,
            doing=doing,
            refused=ArtifactError,
        )
        if [spec.shape for spec in self._specs(answer, doing)] != wanted:
            raise ArtifactError(f"{doing}: MindSpore Lite made it {answer['inputs']}"[:500])
        for array in arrays:
            array.fill(0)
        known.shapes, known.arrays = wanted, arrays
        return arrays

    def run(self, graph: GraphName) -> list[NDArray[Any]]:
        known = self._graphs[graph]
        if not known.shapes:
            raise RunnerError(f"{known.path.name}: the graph was not bound to shapes before a run")
        doing = f"running {known.path.name}"
        answer = self._process.ask({"op": "run", "graph": graph}, seconds=RUN_SECONDS, doing=doing)
        if not answer and known.results:  # at the same offsets as in the last run
            return known.results
        try:
            known.results = [
                known.outputs.view(tuple(one["shape"]), one["dtype"], one["offset"])
                for one in answer["outputs"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            self.close()
            raise RunnerError(f"{doing}: the worker returned invalid outputs: {error!r}") from error
        return known.results

    def ping(self) -> None:
        """Check that the worker responds. Raises RunnerError if it does not."""
        self._process.ask({"op": "ping"}, seconds=START_SECONDS, doing="checking the worker")

    def close(self) -> None:
        """End the worker; bound arrays stay readable."""
        self._process.close()
        for graph in self._graphs.values():
            for memory in _memories(graph):
                memory.close()

    def _start(self, python: Path) -> None:
        try:
            self._process.ask(
                {"op": "start"}, seconds=START_SECONDS, doing="importing mindspore_lite"
            )
        except RunnerError as error:
            raise EnvironmentFault(
                f"{python}: {error.message}", "make lite sets up a Python that has it"
            ) from error

    def _load(self, name: GraphName, threads: int) -> tuple[TensorSpec, ...]:
        graph = self._graphs[name]
        doing = f"loading {graph.path}"
        request = {
            "op": "load",
            "graph": name,
            "path": str(graph.path),
            "threads": threads,
            "inputs": graph.inputs.descriptor,
            "outputs": graph.outputs.descriptor,
        }
        try:
            answer = self._process.ask(
                request, seconds=LOAD_SECONDS, doing=doing, refused=ArtifactError
            )
        except ArtifactError as error:
            raise (
                lite_release.refused(graph.path, error.message, "this MindSpore Lite") or error
            ) from error
        return self._specs(answer, doing)

    def _specs(self, answer: Mapping[str, Any], doing: str) -> tuple[TensorSpec, ...]:
        try:
            return tuple(
                TensorSpec(
                    str(one["name"]),
                    tuple(int(length) for length in one["shape"]),
                    np.dtype(one["dtype"]).name,
                )
                for one in answer["inputs"]
            )
        except (KeyError, TypeError, ValueError) as error:
            self.close()
            raise RunnerError(f"{doing}: the worker returned invalid inputs: {error!r}") from error

    def _check_shapes(self, graph: GraphName, wanted: Sequence[tuple[int, ...]]) -> None:
        specs = self.inputs[graph]
        file = self._graphs[graph].path.name
        if len(wanted) != len(specs):
            raise ArtifactError(
                f"{file}: has {len(specs)} inputs, expected {len(wanted)}: not the graph of this "
                "layout",
                AGAIN,
            )
        for shape, spec in zip(wanted, specs, strict=True):
            if len(shape) != len(spec.shape) or min(shape, default=1) < 1:
                raise ArtifactError(
                    f"{file}: input {spec.name} of shape {list(spec.shape)} cannot be resized to "
                    f"{list(shape)}",
                    AGAIN,
                )


def _memories(graph: _Graph) -> tuple[_Memory, _Memory]:
    return graph.inputs, graph.outputs


def _offsets(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> tuple[list[int], int]:
    """Offsets of consecutive arrays, and their total size in bytes (at least 1)."""
    offsets = []
    size = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        offsets.append(size)
        length = math.prod(shape) * np.dtype(dtype).itemsize
        size += -(-length // ALIGNMENT) * ALIGNMENT
    return offsets, max(size, 1)
