"""A MindIR rewritten for Lite 2.0.0, which tests/backends/lite/test_layouts.py runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.train import mind_ir_pb2

from lite_runner.errors import ArtifactError
from lite_runner.mindir.writer import rewrite_for_lite


class Operators(nn.Cell):
    """One of each operator whose attributes move."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul, self.batch = ops.MatMul(transpose_b=True), ops.BatchMatMul(transpose_a=True)
        self.concat, self.split, self.gather = ops.Concat(-1), ops.Split(-1, 2), ops.Gather()
        self.mean, self.softmax = ops.ReduceMean(keep_dims=True), ops.Softmax(-1)

    def construct(self, x: Tensor, rows: Tensor) -> Tensor:
        left, right = self.split(self.gather(x, rows, 0))
        x = self.concat((right, left, left))
        x = self.softmax(self.mean(self.matmul(x, x), 1))
        return self.batch(ops.Reshape()(x, (1, 2, -1)), ops.Reshape()(x, (1, 2, -1)))


class Unknown(nn.Cell):
    """An operator that was never tried."""

    def construct(self, x: Tensor) -> Tensor:
        return ops.Erfinv()(x)


def exported(cell: nn.Cell, path: Path, *inputs: np.ndarray) -> Path:
    tensors = [Tensor(values) for values in inputs]
    ms.export(cell, *tensors, file_name=str(path), file_format="MINDIR")
    return path


def read(path: Path) -> Any:
    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(path.read_bytes())
    return model


def nodes_of(model: Any) -> dict[str, tuple[Any, Any]]:
    """Each operator's node and primitive; of several nodes the last."""
    primitives = {one.name: one for one in model.primitives}
    named = [(node, node.op_type.removeprefix("REF::")) for node in model.graph.node]
    return {
        primitives[name].op_type: (node, primitives[name])
        for node, name in named
        if name in primitives
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    x = np.zeros((4, 6), np.float32)
    return exported(Operators(), tmp_path / "a.mindir", x, np.zeros(2, np.int32))


def test_the_version_is_the_one_that_lite_knows(path: Path) -> None:
    rewrite_for_lite(path)
    model = read(path)
    assert (model.mind_ir_version, model.ir_version) == (1, "0.1.1")
    assert {one.prim_type for one in model.primitives} == {1}


def test_inputs_become_attributes(path: Path) -> None:
    counts = {name: len(node.input) for name, (node, _) in nodes_of(read(path)).items()}
    rewrite_for_lite(path)
    found = nodes_of(read(path))
    attributes = {
        name: {one.name: one.i for one in primitive.attribute}
        for name, (_, primitive) in found.items()
    }
    assert attributes["MatMul"].items() >= {"transpose_a": 0, "transpose_b": 1}.items()
    assert attributes["MatMul"].items() >= {"transpose_x1": 0, "transpose_x2": 1}.items()
    assert attributes["BatchMatMul"].items() >= {"transpose_a": 1, "adj_x1": 1}.items()
    assert attributes["Concat"].items() >= {"axis": -1, "N": 3, "inputNums": 3}.items()
    assert attributes["Split"].items() >= {"axis": -1, "output_num": 2, "num_split": 2}.items()
    assert attributes["ReduceMean"]["keep_dims"] == 1
    assert attributes["Gather"]["batch_dims"] == 0
    assert "axis" in attributes["Softmax"]
    sizes = next(one for one in found["Split"][1].attribute if one.name == "size_splits")
    assert [one.ints[0] for one in sizes.values] == [3, 3]
    cut = {name: counts[name] - len(found[name][0].input) for name in counts}
    moved = {"MatMul": 2, "BatchMatMul": 2, "Split": 2}
    moved |= dict.fromkeys(("Concat", "ReduceMean", "Gather", "Softmax"), 1)
    assert {name: count for name, count in cut.items() if count} == moved


def test_unread_constants_are_removed(path: Path) -> None:
    rewrite_for_lite(path)
    graph = read(path).graph
    used = {name for node in graph.node for name in node.input}
    constants = {node.output[0] for node in graph.node if node.op_type == "Constant"}
    assert constants and constants <= used


def test_an_unknown_operator_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    path = exported(Unknown(), tmp_path / "u.mindir", np.zeros((2, 2), np.float32))
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match=r"u.mindir: the operator Erfinv") as caught:
        rewrite_for_lite(path)
    assert "MatMul" in caught.value.hint
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["u.mindir"]


def test_an_attribute_that_is_not_constant_is_refused(path: Path) -> None:
    model = read(path)
    node, _ = nodes_of(model)["Softmax"]
    node.input[1] = node.input[0]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="Softmax has an attribute that is not constant"):
        rewrite_for_lite(path)


@pytest.mark.parametrize("operator", ["Concat", "Split"])
def test_an_unknown_node_is_refused(path: Path, operator: str) -> None:
    model = read(path)
    node, _ = nodes_of(model)[operator]
    node.input[0] = "nobody"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match="do not fit together"):
        rewrite_for_lite(path)
    assert read(path) == model


def test_more_parts_than_columns_are_refused(path: Path) -> None:
    model = read(path)
    node, _ = nodes_of(model)["Split"]
    (count,) = [one for one in model.graph.node if one.output[0] == node.input[2]]
    next(one for one in count.attribute if one.name == "value").i = 1 << 40
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactError, match=f"into {1 << 40} parts"):
        rewrite_for_lite(path)


def test_rewriting_twice_is_refused(path: Path) -> None:
    rewrite_for_lite(path)
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match="already MindIR version 1"):
        rewrite_for_lite(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"MZ" * 50, b""])
def test_invalid_mindirs_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.mindir").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"x.mindir: not a MindIR"):
        rewrite_for_lite(tmp_path / "x.mindir")
