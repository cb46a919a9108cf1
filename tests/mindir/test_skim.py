"""MindIR files that are damaged: each reader says so in one ArtifactError, or reads them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mindspore.train.mind_ir_pb2 import GraphProto, ModelProto, TensorProto

from lite_runner.errors import ArtifactError
from lite_runner.mindir import skim
from lite_runner.mindir.inspect import foreign_manifest, read_graph
from lite_runner.mindir.manifest import GraphName
from lite_runner.mindir.skim import mindir_version
from lite_runner.mindir.writer import rewrite_for_lite
from tests.mindir.conftest import Export
from tests.models import reference_model

MUTATIONS = 150
Reader = tuple[Path, Callable[[Path], object]]


def _inspect(path: Path) -> None:
    """As the only graph, or as the prefill of a pair."""
    graphs: dict[GraphName, Path] = {"model": path}
    if (other := path.with_name("tiny_inc_graph.mindir")).exists():
        graphs = {"prefill": path, "increment": other}
    foreign_manifest(graphs, reference_model("llama"), "tiny")


@pytest.fixture(params=["static_pair", "resizable", "rewritten"])
def reader(
    request: pytest.FixtureRequest, exported: Callable[..., Export], tmp_path: Path
) -> Reader:
    """A copy of a graph, with the files beside it, and its reader."""
    if request.param == "rewritten":
        _, folder, graphs = exported("llama", "resizable", rewritten=False)
    else:
        _, folder, graphs = exported("llama", request.param)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    read = rewrite_for_lite if request.param == "rewritten" else _inspect
    read(Path(shutil.copy(copy / next(iter(graphs.values())).file, copy / "whole.mindir")))
    return copy / next(iter(graphs.values())).file, read


def test_damaged_bytes(reader: Reader) -> None:
    path, read = reader
    whole, generator = path.read_bytes(), random.Random(0)
    for turn in range(MUTATIONS):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(min(len(damaged), 5000) if turn % 2 else len(damaged))
            damaged[at] = generator.randrange(256)
        path.write_bytes(damaged if turn % 5 else damaged[: generator.randrange(len(damaged))])
        try:
            read(path)
        except ArtifactError as error:
            assert path.name in str(error)


def _name_parameter(model: Any) -> None:
    model.graph.parameter[0].name = "zqzqzqzq"


def _name_input(model: Any) -> None:
    model.graph.input[0].name = "zqzqzqzq"


def _name_node(model: Any) -> None:
    model.graph.node[0].op_type = "zqzqzqzq"


@pytest.mark.parametrize("change", [_name_parameter, _name_input, _name_node])
@pytest.mark.parametrize("read", [read_graph, rewrite_for_lite])
def test_a_name_that_is_not_utf_8(
    exported: Callable[..., Export],
    tmp_path: Path,
    change: Callable[[Any], None],
    read: Callable[[Path], object],
) -> None:
    _, folder, graphs = exported("llama", "static_pair")
    model = ModelProto.FromString((folder / graphs["prefill"].file).read_bytes())
    change(model)
    path = tmp_path / "a.mindir"
    path.write_bytes(model.SerializeToString().replace(b"zqzqzqzq", b"\xff" * 8))
    with pytest.raises(ArtifactError, match=r"(?i)a\.mindir: not a MindIR.*utf-8"):
        read(path)


def _scalar_input(model: Any) -> None:
    for value in model.graph.input:
        del value.tensor[0].dims[:]


def _huge(model: Any) -> None:
    for value in [*model.graph.input, *model.graph.output]:
        for tensor in value.tensor:
            tensor.dims[:] = [2**62] * len(tensor.dims)


def _negative(model: Any) -> None:
    for one in model.graph.parameter:
        one.dims[:] = [-5] * len(one.dims)


def _no_output_shape(model: Any) -> None:
    for value in model.graph.output:
        for tensor in value.tensor:
            del tensor.dims[:]


def _no_values(model: Any) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            for entry in attribute.values:
                del entry.ints[:]


@pytest.mark.parametrize("change", [_scalar_input, _huge, _negative, _no_output_shape, _no_values])
def test_damaged_shapes(reader: Reader, change: Callable[[Any], None]) -> None:
    path, read = reader
    model = ModelProto.FromString(path.read_bytes())
    change(model)
    path.write_bytes(model.SerializeToString())
    try:
        read(path)
    except ArtifactError as error:
        assert path.name in str(error)


@pytest.mark.parametrize("version", [None, 0, 1, 3, 2**40])
def test_the_version_of_a_file(tmp_path: Path, version: int | None) -> None:
    model = ModelProto(ir_version="0.1.1", producer_name="MindSpore", little_endian=True)
    model.graph.name = "graph" * 100
    if version is not None:
        model.mind_ir_version = version
    path = tmp_path / "a.mindir"
    path.write_bytes(model.SerializeToString())
    assert mindir_version(path) == version


@pytest.mark.parametrize("data", [b"", b"\xff" * 30, b"\x0a\x7fshort", b"not a model" * 9])
def test_invalid_mindirs(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.mindir"
    path.write_bytes(data)
    assert mindir_version(path) is None
    assert mindir_version(tmp_path / "missing") is None


def test_only_what_is_kept_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what lies before it in the file: a model's weights are larger."""
    model = ModelProto(ir_version="0.1.1", mind_ir_version=1)
    parameter = model.graph.parameter.add(name="weight", raw_data=bytes(5000))
    parameter.dims[:] = [1250]
    model.graph.input.add(name="tokens")
    path = tmp_path / "a.mindir"
    path.write_bytes(model.SerializeToString())
    monkeypatch.setattr(skim, "MAX_KEPT", 1000)
    found = skim.read_model(path)
    assert [one.name for one in found.graph.input] == ["tokens"]
    assert not found.graph.parameter[0].raw_data and list(found.graph.parameter[0].dims) == [1250]
    monkeypatch.setattr(skim, "MAX_KEPT", 10)
    with pytest.raises(ArtifactError, match="more than 10 bytes without its weights"):
        skim.read_model(path)


def test_the_numbers_of_fields_are_those_of_mindspore() -> None:
    def numbers(message: Any, *names: str) -> list[int]:
        return [message.DESCRIPTOR.fields_by_name[name].number for name in names]

    model = numbers(ModelProto, "graph", "model_version", "mind_ir_version")
    assert model == [skim._GRAPH, skim._MODEL_VERSION, skim._MIND_IR_VERSION]
    assert numbers(GraphProto, "node", "parameter") == [skim._NODE, skim._PARAMETER]
    assert {*numbers(GraphProto, "name", "input", "output")} == skim._KEPT
    assert {*numbers(TensorProto, "name", "dims", "data_type")} == skim._SHAPE
