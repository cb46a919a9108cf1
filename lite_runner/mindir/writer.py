"""Writes a MindIR: with the same bytes in every process, and for MindSpore Lite 2.0.0.

Lite 2.0.0 reads MindIR version 1. Since then many operator attributes became constant inputs after
the data; they are turned back into attributes, under the names that Lite looks up. Operators
outside the tables are untested, and rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn
from mindspore.train import mind_ir_pb2

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.system.files import temporary_folder
from lite_runner.system.protobuf import parse_message

GRAPH_SUFFIX = "_graph.mindir"
ASCEND_GROUP = "hccl_world_group"  # of all ranks
MINDIR_VERSION, IR_VERSION = 1, "0.1.1"
PRIMITIVE = "REF::"  # a node's op_type: this and the name of an entry of `primitives`

SAME = frozenset(
    [
        *("Add", "Mul", "RealDiv", "Reshape", "Sigmoid", "Sqrt", "Sub"),
        *("Depend", "Load", "MakeTuple", "TupleGetItem", "UpdateState"),
    ]
)
# Operator -> index of an input -> names of the attributes that replace it. These are the last
# inputs of the operator, without gaps.
ATTRIBUTES: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "MatMul": {2: ("transpose_a", "transpose_x1"), 3: ("transpose_b", "transpose_x2")},
    "BatchMatMul": {
        2: ("transpose_a", "transpose_x1", "adj_x1"),
        3: ("transpose_b", "transpose_x2", "adj_x2"),
    },
    "Concat": {1: ("axis",)},
    "Gather": {3: ("batch_dims",)},
    "ReduceMean": {2: ("keep_dims",)},
    "Softmax": {1: ("axis",)},
    "Split": {1: ("axis",), 2: ("output_num", "num_split")},
}


def write_mindir(
    network: nn.Cell, inputs: Sequence[Tensor], folder: Path, stem: str, enc_key: bytes | None
) -> str:
    """Write `<stem>_graph.mindir`, above 1 GB with `<stem>_variables/` beside it; its name.

    Shapes of inputs may contain None. Raises EnvironmentFault if it cannot be written.
    """
    encryption = {} if enc_key is None else {"enc_key": enc_key, "enc_mode": "AES-GCM"}
    network.set_train(False)
    try:
        with temporary_folder() as plain:
            # MindSpore accepts no path with spaces or non-ASCII characters.
            to = plain / "to"
            to.symlink_to(folder.resolve(), target_is_directory=True)
            ms.export(
                network, *inputs, file_name=str(to / stem), file_format="MINDIR", **encryption
            )
    except OSError as error:
        raise EnvironmentFault(
            f"{folder}: cannot write {stem}{GRAPH_SUFFIX}: {error}",
            "make room, or name another folder with output_dir=",
        ) from error
    whole = folder / f"{stem}.mindir"  # MindSpore's name without separate variables
    if whole.exists():
        whole.rename(folder / f"{stem}{GRAPH_SUFFIX}")
    for path in (folder / f"{stem}{GRAPH_SUFFIX}", *folder.glob(f"{stem}_variables/*")):
        path.chmod(0o644)  # MindSpore makes them readable by the owner only
    for path in folder.glob(f"{stem}_variables"):
        path.chmod(0o755)
    if enc_key is None:
        make_reproducible(folder / f"{stem}{GRAPH_SUFFIX}")
    return f"{stem}{GRAPH_SUFFIX}"


def make_reproducible(path: Path) -> None:
    """Rewrite a MindIR so that the same network and weights give the same bytes in every process.

    MindSpore counts its names up through a process, orders primitives and the parts of a name by
    addresses, and stores the time of the export. A graph that calls functions keeps its names.
    """
    model = mind_ir_pb2.ModelProto.FromString(path.read_bytes())
    kept = [one for one in model.graph.attribute if one.name != "compile_phase"]
    del model.graph.attribute[:]
    model.graph.attribute.extend(kept)
    primitives = sorted(model.primitives, key=lambda one: one.name)
    del model.primitives[:]
    model.primitives.extend(primitives)
    if not model.functions:
        _rename(model.graph)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _rename(graph: Any) -> None:
    """Name the graph without its numbers, and nodes by their place."""
    name = re.sub(r"^(\d+_)+|_\d+$", "", graph.name)
    given = (*graph.parameter, *graph.input)
    names = {one.name: f"{name}:{one.name.rpartition(':')[2]}" for one in given}
    names |= {node.output[0]: f"{name}:node_{place}" for place, node in enumerate(graph.node)}
    graph.name = name
    for one in (*given, *graph.output):
        one.name = names[one.name]
    for node in graph.node:
        node.input[:] = [names.get(one, one) for one in node.input]
        node.output[:] = [names[one] for one in node.output]
        node.name = node.output[0]


def name_group(path: Path, group: str) -> None:
    """Set the communication group of a graph's collectives: each device has its own name for the
    group of all ranks. Weights beside the graph stay unchanged."""
    model = mind_ir_pb2.ModelProto.FromString(path.read_bytes())
    for owner in (*model.primitives, *model.graph.node):
        for attribute in owner.attribute:
            if attribute.name == "group":
                attribute.s = group.encode()
    path.write_bytes(model.SerializeToString())


def check_length(model: Decoder, seq_length: int) -> None:
    """Raise ConfigError if a cache is longer than the model's maximum sequence length."""
    if seq_length > model.seq_length:
        raise ConfigError(
            f"an export for sequences of {seq_length} tokens, but the model supports at most "
            f"{model.seq_length}",
            f"use a sequence length of at most {model.seq_length}",
        )


def rewrite_for_lite(path: Path) -> None:
    """Rewrite a MindIR file (above 1 GB the graph file; its variables stay) in place.

    Raises ArtifactError, leaving the file unchanged, if it is no MindIR or already rewritten, or
    has an operator outside the tables or an attribute that is not constant, or is damaged.
    """
    try:
        model = parse_message(mind_ir_pb2.ModelProto, path.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{path}: not a MindIR, or encrypted: {error}") from error
    if not model.graph.node:
        raise ArtifactError(f"{path}: not a MindIR, or one without operators")
    if model.mind_ir_version <= MINDIR_VERSION:
        raise ArtifactError(f"{path}: already MindIR version {model.mind_ir_version}")
    try:
        _Rewriter(path, model).rewrite()
    except (IndexError, KeyError, StopIteration) as error:  # a node names a missing value
        raise ArtifactError(
            f"{path}: its nodes do not fit together: {error!r}", "export the model again"
        ) from error
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(model.SerializeToString())
    temporary.replace(path)


class _Rewriter:
    def __init__(self, path: Path, model: Any) -> None:
        self.path, self.model, self.graph = path, model, model.graph
        self.primitives = {one.name: one for one in model.primitives}
        self.nodes = {node.output[0]: node for node in self.graph.node}
        self.made: dict[tuple[str, bytes], str] = {}

    def rewrite(self) -> None:
        self.model.mind_ir_version, self.model.ir_version = MINDIR_VERSION, IR_VERSION
        for primitive in self.model.primitives:
            primitive.prim_type = 1  # the default, 0, would be omitted, and is rejected
        if self.model.functions:
            raise ArtifactError(f"{self.path}: calls functions, which is untested with Lite 2.0.0")
        for node in self.graph.node:
            if node.op_type != "Constant":
                self._rewrite_node(node)
        used = {name for node in self.graph.node for name in node.input}
        used.update(output.name for output in self.graph.output)
        kept = [
            node for node in self.graph.node if node.op_type != "Constant" or node.output[0] in used
        ]
        del self.graph.node[:]
        self.graph.node.extend(kept)

    def _rewrite_node(self, node: Any) -> None:
        primitive = self.primitives.get(node.op_type.removeprefix(PRIMITIVE))
        operator = node.op_type if primitive is None else primitive.op_type
        if operator in SAME:
            return
        if primitive is None or operator not in ATTRIBUTES:
            raise ArtifactError(
                f"{self.path}: the operator {operator} cannot be rewritten for Lite 2.0.0",
                "supported: " + ", ".join(sorted({*SAME, *ATTRIBUTES})),
            )
        moved = ATTRIBUTES[operator]
        attributes = []
        for position, names in moved.items():
            if position < len(node.input):
                value = self._constant(operator, node.input[position])
                attributes += [_named(value, name) for name in names]
        if operator == "Concat":
            parts = len(self.nodes[node.input[0]].input)
            attributes += [_integer(name, parts) for name in ("N", "inputNums")]
        if operator == "Split":
            attributes.append(self._equal_parts(node))
        node.op_type = PRIMITIVE + self._primitive_with(primitive, attributes)
        del node.input[min(moved) :]

    def _primitive_with(self, primitive: Any, attributes: list[Any]) -> str:
        """Copy a primitive, with these attributes added; the name of the copy."""
        key = primitive.name, b"".join(one.SerializeToString() for one in attributes)
        if key not in self.made:
            self.made[key] = f"{primitive.name}_lite_{len(self.made)}"
            copied = self.model.primitives.add()
            copied.CopyFrom(primitive)
            copied.name = self.made[key]
            replaced = {one.name for one in attributes}
            kept = [one for one in primitive.attribute if one.name not in replaced]
            del copied.attribute[:]
            copied.attribute.extend([*kept, *attributes])
        return self.made[key]

    def _constant(self, operator: str, name: str) -> Any:
        node = self.nodes.get(name)
        if node is None or node.op_type != "Constant":
            raise ArtifactError(
                f"{self.path}: {operator} has an attribute that is not constant ({name})"
            )
        return next(one for one in node.attribute if one.name == "value")

    def _equal_parts(self, node: Any) -> Any:
        """The explicit sizes of a Split, which Lite requires, at the exported shape."""
        axis, count = (self._constant("Split", name).i for name in node.input[1:3])
        size = self._shape(node.input[0])[axis]
        if not 0 < count <= size:
            raise ArtifactError(f"{self.path}: splits {size} columns into {count} parts")
        attribute = mind_ir_pb2.AttributeProto(
            name="size_splits", type=mind_ir_pb2.AttributeProto.TUPLE
        )
        for _ in range(count):
            attribute.values.add(type=mind_ir_pb2.AttributeProto.INT64, ints=[size // count])
        return attribute

    def _shape(self, name: str) -> list[int]:
        for one in self.nodes[name].attribute:
            if one.name == "shape":
                return list(one.tensors[0].dims)
        raise ArtifactError(f"{self.path}: no shape for {name}")


def _named(value: Any, name: str) -> Any:
    attribute = mind_ir_pb2.AttributeProto()
    attribute.CopyFrom(value)
    attribute.name = name
    return attribute


def _integer(name: str, value: int) -> Any:
    kind = mind_ir_pb2.AttributeProto.INT64
    return mind_ir_pb2.AttributeProto(name=name, type=kind, i=value)
