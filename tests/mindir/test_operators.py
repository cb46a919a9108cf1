"""Graphs of our own operators as files: what MindSpore makes of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.mindir.operators import LIBRARY, resolve, write_graph
from lite_runner.native.layout import ALIGNMENT

WEIGHTS = {
    "bytes": np.arange(130, dtype=np.uint8),
    "halves": np.linspace(-1, 1, 6).astype(np.float16).reshape(2, 3),
    "floats": np.array([[1.5, -2.0]], np.float32),
    "empty": np.zeros((2, 50_000), np.int8),
}


class Network(nn.Cell):
    """Calls an operator; nobody runs it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        for name, values in WEIGHTS.items():
            self.insert_param_to_cell(name, Parameter(Tensor(values), name, False))
        self.operator = ops.Custom(
            path, lambda *shapes: (4, 2), lambda *types: ms.float32, func_type="aot"
        )

    def construct(self, x: Tensor) -> Tensor:
        return self.operator(x, self.bytes, self.halves, self.floats, self.empty)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    network = Network("/some/where/operators.so:Head")
    return tmp_path / write_graph(network, [Tensor(np.zeros(3, np.int32))], tmp_path, "tiny")


def change(path: Path, how: Callable[[Any], None]) -> None:
    model = ModelProto()
    model.ParseFromString(path.read_bytes())
    how(model)
    path.write_bytes(model.SerializeToString())


def test_no_path_is_in_it_and_its_values_are_beside_it(written: Path, tmp_path: Path) -> None:
    assert b"/some/where" not in written.read_bytes()
    assert f"{LIBRARY}:Head".encode() in written.read_bytes()
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert names == ["tiny_graph.mindir", "tiny_variables", "tiny_variables/data_0"]
    assert (tmp_path / names[2]).stat().st_size < 500  # the zeros take no room
    cell = nn.GraphCell(ms.load(str(written)))  # MindSpore itself finds them there
    for name, values in WEIGHTS.items():
        if name == "empty":
            continue
        found = cell.parameters_dict()[name].asnumpy()
        assert found.dtype == values.dtype and np.array_equal(found, values)


def test_resolved_it_calls_the_library_and_tells_where_its_values_are(
    written: Path, tmp_path: Path
) -> None:
    target = tmp_path / "resolved.mindir"
    stored = resolve(written, Path("/here/ours.so"), target).stored
    model = ModelProto()
    model.ParseFromString(target.read_bytes())
    calls = [one.s for primitive in model.primitives for one in primitive.attribute]
    assert b"/here/ours.so:Head" in calls
    assert not any(one.HasField("external_data") for one in model.graph.parameter)
    assert set(stored) == set(WEIGHTS)
    for name, values in WEIGHTS.items():
        found = stored[name].read()
        assert found.dtype == values.dtype and np.array_equal(found, values)
        assert name == "empty" or found.ctypes.data % ALIGNMENT == 0


def operators_of(model: Any) -> list[Any]:
    return [one for one in model.primitives if one.op_type == "Custom"]


def named(operator: Any, name: str) -> Any:
    return next(one for one in operator.attribute if one.name == name)


def call(what: bytes) -> Callable[[Any], None]:
    def how(model: Any) -> None:
        named(operators_of(model)[0], "func_name").s = what

    return how


def not_aot(model: Any) -> None:
    named(operators_of(model)[0], "func_type").s = b"pyfunc"


def in_a_node(model: Any) -> None:
    node = model.graph.node.add(op_type="Custom", name="x", output=["x"])
    node.attribute.add(name="func_name", s=b"/evil.so:Head")


def in_a_function(model: Any) -> None:
    model.functions.add(name="f").node.add(op_type="Custom", output=["x"])


def move(**fields: Any) -> Callable[[Any], None]:
    def how(model: Any) -> None:
        for name, value in fields.items():
            setattr(model.graph.parameter[0].external_data, name, value)

    return how


def grow(model: Any) -> None:
    model.graph.parameter[0].dims[0] = 1 << 40


def below_nothing(model: Any) -> None:
    model.graph.parameter[0].dims[0] = -1


def a_list(model: Any) -> None:
    model.graph.parameter[0].data_type = 8


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (call(b"/evil.so:run"), "calls 'run', which is not ours"),
        (call(b"no colon"), "which is not ours"),
        (not_aot, "calls 'Head', which is not ours"),
        (in_a_node, "an operator of its own in a node"),
        (in_a_function, "an operator of its own in a node"),
        (move(location="../other"), "'../other', which is not beside it"),
        (move(location="/etc/passwd"), "'/etc/passwd', which is not beside it"),
        (move(offset=1 << 40), "goes beyond the"),
        (move(offset=0), "goes beyond the"),
        (move(length=1), "1 bytes, expected"),
        (grow, "bytes, expected"),
        (below_nothing, "has the shape"),
        (a_list, "is of type 8, which none of ours takes"),
    ],
)
def test_what_was_changed_is_refused(
    how: Callable[[Any], None], message: str, written: Path, tmp_path: Path
) -> None:
    change(written, how)
    with pytest.raises(ArtifactError, match=f"tiny_graph.mindir: .*{message}"):
        resolve(written, Path("/here/ours.so"), tmp_path / "resolved.mindir")
    assert not (tmp_path / "resolved.mindir").exists()


def test_the_library_of_a_changed_path_is_not_called(written: Path, tmp_path: Path) -> None:
    change(written, call(b"/evil.so:Head"))
    resolve(written, Path("/here/ours.so"), tmp_path / "resolved.mindir")
    assert b"evil" not in (tmp_path / "resolved.mindir").read_bytes()


def test_no_mindir(written: Path, tmp_path: Path) -> None:
    written.write_bytes(b"\xff" * 100)
    with pytest.raises(ArtifactError, match="no MindIR, or a damaged one"):
        resolve(written, Path("/here/ours.so"), tmp_path / "resolved.mindir")
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        resolve(tmp_path / "none", Path("/here/ours.so"), tmp_path / "resolved.mindir")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"cannot write tiny_graph\.mindir"):
        write_graph(
            Network("operators.so:Head"), [Tensor(np.zeros(3, np.int32))], tmp_path / "no", "tiny"
        )
