"""A graph of our own operators as files: it names no place of this machine.

In the file the operators are those of `operators.so`, wherever that is; who loads it says where.
The parameters lie beside the graph, in the form in which MindSpore writes those above 1 GB, so that
the graph can be changed while its weights stay on disk. Those that are zero, as an empty cache is,
have no values in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.train import mind_ir_pb2
from mindspore.train.mind_ir_pb2 import TensorProto
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.mindir.writer import GRAPH_SUFFIX
from lite_runner.native.layout import ALIGNMENT, aligned
from lite_runner.records import dataclass
from lite_runner.system.files import temporary_folder
from lite_runner.system.protobuf import parse_message

LIBRARY = "operators.so"
OPERATORS = ("Embedding", "Layers", "Head", "CappedHead")
MAX_GRAPH = 64 * 2**20  # bytes of a graph without its parameters
AGAIN = "export the model again"
_LITTLE_ENDIAN = b"\x01"  # the first of the bytes in front of MindSpore's parameters
_TYPES: dict[int, type[np.generic]] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.INT8: np.int8,
    TensorProto.UINT8: np.uint8,
}


@dataclass(frozen=True)
class Stored:
    """A parameter on disk."""

    path: Path | None  # None: zeros
    offset: int
    shape: tuple[int, ...]
    dtype: type[np.generic]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def read(self) -> NDArray[Any]:
        """Its values. Raises ArtifactError where the file ends before."""
        if self.path is None:
            return np.zeros(self.shape, self.dtype)
        block = aligned(self.nbytes)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if file.readinto(block.data) != len(block):
                raise ArtifactError(f"{self.path}: ends before byte {self.offset + self.nbytes}")
        values: NDArray[Any] = block.view(self.dtype).reshape(self.shape)
        return values


def write_graph(network: nn.Cell, inputs: Sequence[Tensor], folder: Path, stem: str) -> str:
    """Write `<stem>_graph.mindir` and `<stem>_variables/data_0`; the name of the first.

    A full disk is an EnvironmentFault.
    """
    parameters = {one.name: one for one in network.get_parameters()}
    name = f"{stem}{GRAPH_SUFFIX}"
    model = _graph_of(network, inputs)
    _set_library(model.primitives, LIBRARY)
    data = folder / f"{stem}_variables" / "data_0"
    try:
        data.parent.mkdir()
        with data.open("wb") as file:
            file.write(_LITTLE_ENDIAN.ljust(ALIGNMENT, b"\0"))
            for one in model.graph.parameter:
                values = parameters[_short(one.name)].asnumpy()
                if not values.any():
                    continue
                one.external_data.location = data.relative_to(folder).as_posix()
                one.external_data.offset = file.tell()
                one.external_data.length = values.nbytes
                file.write(memoryview(values).cast("B"))
                file.write(bytes(-values.nbytes % ALIGNMENT))
        (folder / name).write_bytes(model.SerializeToString())
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: cannot write {name}: {error}",
            "make room, or name another folder with output_dir=",
        ) from error
    return name


@dataclass(frozen=True)
class Resolved:
    """A graph whose operators are those of this machine, and where its values are."""

    model: Any  # the ModelProto, without values
    stored: dict[str, Stored]  # by the names of the parameters


def resolve(path: Path, library: Path, target: Path) -> Resolved:
    """Write to `target` a graph file whose operators are those of `library`, and which has no
    values.

    Raises ArtifactError for what `write_graph` has not written.
    """
    model = _read(path)
    try:
        _set_library(model.primitives, str(library))
        _check_nodes([model.graph, *model.functions])
        stored = {_short(one.name): _stored(one, path.parent) for one in model.graph.parameter}
    except (ValueError, OSError) as error:  # OSError: a location that no file can have
        raise ArtifactError(f"{path}: {error}", AGAIN) from error
    for one in model.graph.parameter:
        one.ClearField("external_data")
        one.ClearField("raw_data")
    target.write_bytes(model.SerializeToString())
    return Resolved(model, stored)


def _graph_of(network: nn.Cell, inputs: Sequence[Tensor]) -> Any:
    """The ModelProto of a network, without the values of its parameters."""
    kept = mind_ir_pb2.ModelProto()

    def keep(model: Any) -> None:
        kept.CopyFrom(model)
        del model.graph.parameter[:]  # what MindSpore is left to write then is small

    network.set_train(False)
    with temporary_folder() as folder:
        file = str(folder / "graph")
        ms.export(network, *inputs, file_name=file, file_format="MINDIR", custom_func=keep)
    return kept


def _set_library(primitives: Iterable[Any], library: str) -> None:
    """Let operators of our own be of this library. ValueError for any other that is custom."""
    for primitive in primitives:
        texts = {one.name: one for one in primitive.attribute}
        if primitive.op_type != "Custom" and "func_name" not in texts:
            continue
        whole = {"func_name", "func_type", "uniq_name"} <= set(texts)
        operator = texts["func_name"].s.decode().rpartition(":")[2] if whole else ""
        if operator not in OPERATORS or texts["func_type"].s != b"aot":
            raise ValueError(f"calls {operator or primitive.op_type!r}, which is not ours")
        texts["func_name"].s = f"{library}:{operator}".encode()
        texts["uniq_name"].s = f"Custom_{operator}".encode()


def _check_nodes(graphs: Iterable[Any]) -> None:
    """A node may name an operator in two ways; those of our own are all among the primitives."""
    for graph in graphs:
        for node in graph.node:
            names = {one.name for one in [*node.attribute, *node.primal_attr, *node.node_attr]}
            if node.op_type == "Custom" or "func_name" in names:
                raise ValueError("has an operator of its own in a node")


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_GRAPH + 1)
        if len(content) > MAX_GRAPH:
            raise ArtifactError(f"{path}: more than {MAX_GRAPH} bytes without its parameters")
        return parse_message(mind_ir_pb2.ModelProto, content)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}", AGAIN) from error
    except ValueError as error:
        raise ArtifactError(f"{path}: no MindIR, or a damaged one: {error}", AGAIN) from error


def _stored(parameter: Any, folder: Path) -> Stored:
    """Where a parameter is; ValueError where that cannot be."""
    name, place = _short(parameter.name), parameter.external_data
    if parameter.data_type not in _TYPES:
        raise ValueError(f"{name} is of type {parameter.data_type}, which none of ours takes")
    shape, dtype = tuple(parameter.dims), _TYPES[parameter.data_type]
    if min(shape, default=1) < 0:
        raise ValueError(f"{name} has the shape {shape}")
    if not parameter.HasField("external_data"):
        return Stored(None, 0, shape, dtype)
    path = (folder / place.location).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise ValueError(f"{name} is in {place.location!r}, which is not beside it")
    found = Stored(path, place.offset, shape, dtype)
    end = path.stat().st_size
    if found.nbytes != place.length:
        raise ValueError(f"{name}: {place.length} bytes, expected {found.nbytes}")
    if place.offset < ALIGNMENT or place.offset + place.length > end:
        raise ValueError(f"{name} goes beyond the {end} bytes of {place.location}")
    return found


def _short(name: str) -> str:
    """A parameter's name without MindSpore's prefix."""
    return name.rpartition(":")[2]
