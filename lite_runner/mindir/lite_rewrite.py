"""Rewrites a MindIR of current MindSpore for MindSpore Lite 2.0.0.

Lite 2.0.0 reads MindIR version 1. Since then many operator attributes became constant inputs after
the data; they are turned back into attributes, under the names that Lite looks up. The computation
stays the same. Operators outside the tables are untested, and rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspore.train import mind_ir_pb2

from lite_runner.errors import ArtifactError
from lite_runner.system.protobuf import parse_message

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


def rewrite_for_lite(path: Path) -> None:
    """Rewrite a MindIR file (above 1 GB the graph file; its variables stay) in place.

    Raises ArtifactError, leaving the file unchanged, if it is no MindIR or already rewritten, or
    has an operator outside the tables or an attribute that is not constant.
    """
    try:
        model = parse_message(mind_ir_pb2.ModelProto, path.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{path}: no MindIR, or encrypted: {error}") from error
    if not model.graph.node:
        raise ArtifactError(f"{path}: no MindIR, or one without operators")
    if model.mind_ir_version <= MINDIR_VERSION:
        raise ArtifactError(f"{path}: already MindIR version {model.mind_ir_version}")
    _Rewriter(path, model).rewrite()
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
        made = mind_ir_pb2.AttributeProto(name="size_splits", type=mind_ir_pb2.AttributeProto.TUPLE)
        for _ in range(count):
            made.values.add(type=mind_ir_pb2.AttributeProto.INT64, ints=[size // count])
        return made

    def _shape(self, name: str) -> list[int]:
        for one in self.nodes[name].attribute:
            if one.name == "shape":
                return list(one.tensors[0].dims)
        raise ArtifactError(f"{self.path}: no shape for {name}")


def _named(value: Any, name: str) -> Any:
    made = mind_ir_pb2.AttributeProto()
    made.CopyFrom(value)
    made.name = name
    return made


def _integer(name: str, value: int) -> Any:
    kind = mind_ir_pb2.AttributeProto.INT64
    return mind_ir_pb2.AttributeProto(name=name, type=kind, i=value)
