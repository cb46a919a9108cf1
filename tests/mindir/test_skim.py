"""MindIR files that are damaged: each reader says so in one ArtifactError, or reads them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.errors import ArtifactError
from lite_runner.mindir.inspect import foreign_manifest, read_graph
from lite_runner.mindir.lite_rewrite import rewrite_for_lite
from lite_runner.mindir.manifest import GraphName
from lite_runner.mindir.operators import resolve
from tests.models import reference_model
from tests.paths import ROOT

FROZEN = ROOT / "tests/fixtures/frozen/artifacts"
MUTATIONS = 150


def _inspect(path: Path) -> None:
    foreign_manifest({"model": path}, reference_model("llama"), "tiny")


def _inspect_pair(path: Path) -> None:
    other = FROZEN / "pair/auto_inc_graph.mindir"
    graphs: dict[GraphName, Path] = {"prefill": path, "increment": other}
    foreign_manifest(graphs, reference_model("bloom_6_heads"), "tiny")


def _resolve(path: Path) -> None:
    resolve(path, Path("/here/operators.so"), path.with_name("resolved.mindir"))


READERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "one graph": ("dynamic/auto_graph.mindir", _inspect),
    "pair": ("pair/auto_prefill_graph.mindir", _inspect_pair),
    "resizable": ("resizable/auto_graph.mindir", _inspect),
    "native": ("a16w8/auto_graph.mindir", _resolve),
    "rewritten": ("dynamic/auto_graph.mindir", rewrite_for_lite),
}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Path], None]]:
    """A copy of a graph, with what lies beside it, and what reads it."""
    name, read = READERS[request.param]
    folder = tmp_path / "copy"
    shutil.copytree((FROZEN / name).parent, folder)
    return folder / Path(name).name, read


def test_damaged_bytes(reader: tuple[Path, Callable[[Path], None]]) -> None:
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
@pytest.mark.parametrize("read", [read_graph, _resolve, rewrite_for_lite])
def test_a_name_that_is_not_utf_8(
    tmp_path: Path, change: Callable[[Any], None], read: Callable[[Path], object]
) -> None:
    model = ModelProto.FromString((FROZEN / "dynamic/auto_graph.mindir").read_bytes())
    change(model)
    path = tmp_path / "a.mindir"
    path.write_bytes(model.SerializeToString().replace(b"zqzqzqzq", b"\xff" * 8))
    with pytest.raises(ArtifactError, match=r"(?i)a\.mindir: no MindIR.*utf-8"):
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
def test_damaged_shapes(
    reader: tuple[Path, Callable[[Path], None]], change: Callable[[Any], None]
) -> None:
    path, read = reader
    model = ModelProto.FromString(path.read_bytes())
    change(model)
    path.write_bytes(model.SerializeToString())
    try:
        read(path)
    except ArtifactError as error:
        assert path.name in str(error)
