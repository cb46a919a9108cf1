"""The process in which MindSpore Lite runs: stand-alone, Python 3.7, NumPy and mindspore_lite.

Its client is worker.py. Requests come on stdin, answers go to the original stdout; both are framed
JSON: a length (4 bytes, little endian) and that many bytes. An answer is {"answer": {...}} or
{"error": "..."}. Tensors are in shared memory: per graph one file descriptor for inputs and one
for outputs.

    {"op": "start"}                       imports mindspore_lite
    {"op": "load", "graph", "path", "threads", "inputs", "outputs"}
                                          builds a graph; the last two are file descriptors
    {"op": "bind", "graph", "shapes", "offsets", "size"}
                                          resizes it, with its inputs at these offsets
    {"op": "run", "graph"}                the outputs' offsets, in the order of the graph; nothing
                                          while they are unchanged since the last run
    {"op": "ping"}

The process exits at the end of stdin, and with its parent.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
from typing import Any, BinaryIO, Dict

import numpy as np

PR_SET_PDEATHSIG = 1
LENGTH = struct.Struct("<I")
ALIGNMENT = 64

Message = Dict[str, Any]


class Graph:
    """A Lite model, and the shared memory of its inputs and outputs."""

    def __init__(self, lite: Any, request: Message) -> None:
        path = request["path"]
        # Lite looks for the weights of an .ms file in the current folder only.
        os.chdir(os.path.dirname(path))  # noqa: PTH120
        context = lite.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = request["threads"]
        kinds = lite.ModelType
        kind = kinds.MINDIR_LITE if path.endswith(".ms") else kinds.MINDIR
        self.model = lite.Model()
        self.model.build_from_file(path, kind, context)
        self.tensors = self.model.get_inputs()
        self.inputs_fd = request["inputs"]
        self.outputs_fd = request["outputs"]
        self.arrays: list[Any] = []  # Lite reads their memory without owning it
        self.outputs = mmap.mmap(-1, 1)
        self.targets: list[Any] = []  # of the outputs; none before the first run

    def inputs(self) -> Message:
        """Names, current shapes and NumPy dtype names of the inputs."""
        return {"inputs": [describe(tensor) for tensor in self.tensors]}

    def bind(self, request: Message) -> Message:
        """Resize, and read the inputs at these offsets from now on."""
        self.model.resize(self.tensors, request["shapes"])
        self.tensors = self.model.get_inputs()
        memory = mmap.mmap(self.inputs_fd, request["size"])
        arrays: list[Any] = [
            np.ndarray(tensor.shape, dtype_name(tensor), memory, offset)
            for tensor, offset in zip(self.tensors, request["offsets"])
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


class Worker:
    """Handles requests."""

    def __init__(self) -> None:
        self.lite: Any = None
        self.graphs: dict[str, Graph] = {}

    def do(self, request: Message) -> Message:
        """The answer to a request. Raises what Lite raises."""
        op = request["op"]
        if op == "start":
            import mindspore_lite

            self.lite = mindspore_lite
        elif op == "load":
            graph = Graph(self.lite, request)
            self.graphs[request["graph"]] = graph
            return graph.inputs()
        elif op == "bind":
            return self.graphs[request["graph"]].bind(request)
        elif op == "run":
            return self.graphs[request["graph"]].run()
        return {}


def dtype_name(tensor: Any) -> str:
    """NumPy's name of a Lite tensor's dtype."""
    return np.dtype(tensor.dtype.name.lower()).name


def describe(tensor: Any) -> Message:
    """Description of an input for the client."""
    return {"name": tensor.name, "shape": tensor.shape, "dtype": dtype_name(tensor)}


def describe_output(tensor: Any, array: Any, offset: int) -> Message:
    """Description of an output for the client."""
    name = array.dtype.name
    return {"name": tensor.name, "shape": array.shape, "dtype": name, "offset": offset}


def read(stream: BinaryIO) -> Message:
    """The next request. Raises EOFError at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    body = stream.read(LENGTH.unpack(head)[0])
    request: Message = json.loads(body.decode("utf-8"))
    return request


def main() -> None:
    """Answer requests until stdin ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout, which would corrupt the answers
    worker = Worker()
    while True:
        try:
            request = read(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # skips Lite's own cleanup, which is slow and may crash
        try:
            answer: Message = {"answer": worker.do(request)}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        body = json.dumps(answer).encode("utf-8")
        answers.write(LENGTH.pack(len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    main()
