"""The MindSpore Lite worker: Python 3.7, NumPy and mindspore_lite.

workers/main.py runs it and describes the protocol; its client is worker.py. Tensors are in shared
memory: per graph one file descriptor for inputs and one for outputs.

    {"op": "start"}                       imports mindspore_lite
    {"op": "load", "graph", "path", "threads", "inputs", "outputs"}
                                          builds a graph; the last two are file descriptors
    {"op": "bind", "graph", "shapes", "offsets", "size"}
                                          resizes it, with its inputs at these offsets
    {"op": "run", "graph"}                the outputs' offsets, in the order of the graph; nothing
                                          while they are unchanged since the last run
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Callable, Dict

import numpy as np

ALIGNMENT = 64

Message = Dict[str, Any]


class LoadedGraph:
    """A Lite model, and the shared memory of its inputs and outputs."""

    def __init__(self, lite: Any, path: str, threads: int, inputs: int, outputs: int) -> None:
        # Lite looks for the weights of an .ms file in the current folder only.
        os.chdir(os.path.dirname(path))  # noqa: PTH120
        context = lite.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = threads
        kinds = lite.ModelType
        kind = kinds.MINDIR_LITE if path.endswith(".ms") else kinds.MINDIR
        self.model = lite.Model()
        self.model.build_from_file(path, kind, context)
        self.tensors = self.model.get_inputs()
        self.inputs_fd, self.outputs_fd = inputs, outputs
        self.arrays: list[Any] = []  # Lite reads their memory without owning it
        self.outputs = mmap.mmap(-1, 1)
        self.targets: list[Any] = []  # of the outputs; none before the first run

    def inputs(self) -> Message:
        """Names, current shapes and NumPy dtype names of the inputs."""
        return {"inputs": [describe(tensor) for tensor in self.tensors]}

    def bind(self, shapes: list[list[int]], offsets: list[int], size: int) -> Message:
        """Resize, and read the inputs at these offsets from now on."""
        self.model.resize(self.tensors, shapes)
        self.tensors = self.model.get_inputs()
        memory = mmap.mmap(self.inputs_fd, size)
        arrays: list[Any] = [
            np.ndarray(tensor.shape, dtype_name(tensor), memory, offset)
            for tensor, offset in zip(self.tensors, offsets)
        ]
        for tensor, array in zip(self.tensors, arrays):
            tensor.set_data_from_numpy(array)  # no copy: later runs read the changed contents
        self.arrays = arrays
        self.targets = []
        return self.inputs()

    def run(self) -> Message:
        """Predict, and copy the outputs: the next run overwrites Lite's own memory."""
        tensors = self.model.predict(self.tensors)
        arrays = [tensor.get_data_to_numpy() for tensor in tensors]
        answer = {}
        if [target.shape for target in self.targets] != [array.shape for array in arrays]:
            offsets = self.place(arrays)
            places = zip(tensors, arrays, offsets)
            answer["outputs"] = [describe_output(*place) for place in places]
        for target, array in zip(self.targets, arrays):
            target[...] = array
        return answer

    def place(self, arrays: list[Any]) -> list[int]:
        """Allocate memory for these outputs; their offsets."""
        offsets = []
        size = 0
        for array in arrays:
            offsets.append(size)
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self.outputs):
            os.ftruncate(self.outputs_fd, size)
            self.outputs = mmap.mmap(self.outputs_fd, size)
        self.targets = [
            np.ndarray(array.shape, array.dtype, self.outputs, offset)
            for array, offset in zip(arrays, offsets)
        ]
        return offsets


class LiteWorker:
    """The operations of the requests. They raise Lite's errors."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self.lite: Any = None
        self.graphs: dict[str, LoadedGraph] = {}

    def start(self) -> Message:
        import mindspore_lite

        self.lite = mindspore_lite
        return {}

    def load(self, graph: str, **options: Any) -> Message:
        self.graphs[graph] = LoadedGraph(self.lite, **options)
        return self.graphs[graph].inputs()

    def bind(self, graph: str, **sizes: Any) -> Message:
        return self.graphs[graph].bind(**sizes)

    def run(self, graph: str) -> Message:
        return self.graphs[graph].run()


WORKER = LiteWorker


def dtype_name(tensor: Any) -> str:
    """NumPy's name of a Lite tensor's dtype."""
    return np.dtype(tensor.dtype.name.lower()).name


def describe(tensor: Any) -> Message:
    """Description of an input for the client."""
    return {"name": tensor.name, "shape": tensor.shape, "dtype": dtype_name(tensor)}


def describe_output(tensor: Any, array: Any, offset: int) -> Message:
    name = array.dtype.name
    return {"name": tensor.name, "shape": array.shape, "dtype": name, "offset": offset}
