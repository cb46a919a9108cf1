"""Graphs of packed layers that are wired otherwise than the exported ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import Manifest, read_manifest
from lite_runner.mindir.native_checks import check_graph
from lite_runner.mindir.operators import resolve
from tests.frozen_artifacts import EXPORTS, FOLDER

PACKED = [name for name in EXPORTS if name.startswith("a")]
PATH = Path("a.mindir")


def given(name: str, tmp_path: Path) -> tuple[Any, Manifest]:
    manifest = read_manifest(FOLDER / name)
    graph = manifest.paths(FOLDER / name)["model"]
    return resolve(graph, Path("ours.so"), tmp_path / "resolved").model, manifest


def changed(model: Any) -> Any:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def kind_of(model: Any, node: Any) -> str:
    kinds = {one.name: one.op_type for one in model.primitives}
    kind: str = kinds.get(node.op_type.removeprefix("REF::"), node.op_type)
    return kind


@pytest.mark.parametrize("name", PACKED)
def test_what_was_exported_passes(name: str, tmp_path: Path) -> None:
    model, manifest = given(name, tmp_path)
    check_graph(PATH, model, manifest)


@pytest.mark.parametrize("name", ["a16w8", "a16w8_kv_int8"])
def test_no_input_of_an_operator_may_be_another(name: str, tmp_path: Path) -> None:
    model, manifest = given(name, tmp_path)
    others = [one.name for one in (*model.graph.input, *model.graph.parameter)]
    loads = {
        one.output[0]: one.input[0] for one in model.graph.node if kind_of(model, one) == "Load"
    }
    for at, node in enumerate(model.graph.node):
        if kind_of(model, node) in ("UpdateState", "MakeTuple", "Constant"):
            continue
        values = 1 if kind_of(model, node) in ("Load", "Depend") else len(node.input)
        for index in range(values):
            for other in others:
                if other in (node.input[index], loads.get(node.input[index])):
                    continue
                wrong = changed(model)
                wrong.graph.node[at].input[index] = other
                with pytest.raises(ArtifactError, match=r"a\.mindir: "):
                    check_graph(PATH, wrong, manifest)


def test_no_shape_may_be_another(tmp_path: Path) -> None:
    """But that of a layer, which is as long as its values: see Stored."""
    model, manifest = given("a16w8_kv_int8", tmp_path)

    def tensors(model: Any) -> list[Any]:
        shapes = [
            tensor
            for node in model.graph.node
            if kind_of(model, node) in ("Custom", "Load", "Depend")
            for one in node.attribute
            if one.name == "shape"
            for tensor in one.tensors
        ]
        ends = [one.tensor[0] for one in (*model.graph.input, *model.graph.output)]
        caches = [one for one in model.graph.parameter if ":layer" not in one.name]
        return [*shapes, *ends, *caches]

    for index, tensor in enumerate(tensors(model)):
        for axis in range(len(tensor.dims)):
            for size in (0, tensor.dims[axis] + 1, -1, 1 << 40):
                wrong = changed(model)
                tensors(wrong)[index].dims[axis] = size
                with pytest.raises(ArtifactError, match="got"):
                    check_graph(PATH, wrong, manifest)
        wrong = changed(model)
        tensors(wrong)[index].data_type = 10
        with pytest.raises(ArtifactError, match=r"a\.mindir: "):
            check_graph(PATH, wrong, manifest)


def more_primitives(model: Any) -> None:
    model.primitives.add().CopyFrom(model.primitives[0])


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another function": (lambda model: model.functions.add(name="f"), "functions: got 1"),
    "another node": (
        lambda model: model.graph.node.add(op_type="REF::Load:9", output=["x"]),
        "is a REF::Load:9",
    ),
    "another operator": (
        lambda model: model.graph.node.add(op_type="Add", output=["x"]),
        "is a Add, which is not expected",
    ),
    "two primitives of a name": (more_primitives, "names of primitives"),
    "another parameter": (
        lambda model: model.graph.parameter.add(name="x:keys9", data_type=1, dims=[1]),
        "not those of",
    ),
    "a parameter twice": (
        lambda model: model.graph.parameter.add().CopyFrom(model.graph.parameter[0]),
        "not those of",
    ),
    "no parameter": (lambda model: model.graph.parameter.pop(), "missing among its parameters"),
    "another reference": (
        lambda model: setattr(model.graph.parameter[1], "ref_key", "layer3"),
        "reference to layer1: got layer3",
    ),
    "no output": (lambda model: model.graph.output.pop(), "values to unpack"),
    "an input as output": (
        lambda model: setattr(model.graph.output[0], "name", model.graph.input[0].name),
        "output: got step",
    ),
    "a node over a value": (
        lambda model: model.graph.node[1].output.__setitem__(0, model.graph.input[0].name),
        "two values are called",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_else_may_be_in_it(what: str, tmp_path: Path) -> None:
    model, manifest = given("a16w8", tmp_path)
    change, message = CHANGES[what]
    change(model)
    with pytest.raises(ArtifactError, match=message):
        check_graph(PATH, model, manifest)


def test_operators_may_not_be_exchanged_or_missing(tmp_path: Path) -> None:
    model, manifest = given("a16w8", tmp_path)
    custom = [one for one in model.primitives if one.op_type == "Custom"]
    wrong = changed(model)
    first, second = (
        one for one in wrong.primitives if one.name in (custom[0].name, custom[1].name)
    )
    first.name, second.name = second.name, first.name
    with pytest.raises(ArtifactError, match=r"operator: got|inputs of"):
        check_graph(PATH, wrong, manifest)
    calls = [at for at, one in enumerate(model.graph.node) if kind_of(model, one) == "Custom"]
    for at in calls:
        wrong = changed(model)
        del wrong.graph.node[at]
        with pytest.raises(ArtifactError, match=r"a\.mindir: "):
            check_graph(PATH, wrong, manifest)


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", 0), ("hidden_size", 32.0), ("seq_length", "32"), ("vocab_size", True)],
)
def test_sizes_of_the_model_are_numbers(field: str, value: object, tmp_path: Path) -> None:
    model, manifest = given("a16w8", tmp_path)
    wrong = dataclasses.replace(manifest.model, **{field: value})
    with pytest.raises(ArtifactError, match=f"{field}: got {value!r}, expected a number from 1"):
        check_graph(PATH, model, dataclasses.replace(manifest, model=wrong))


def test_heads_are_those_that_the_operators_compute(tmp_path: Path) -> None:
    model, manifest = given("a16w8", tmp_path)
    for heads, message in (
        ({"kv_heads": 3}, "3 key/value heads do not divide"),
        ({"head_dim": 514}, "head_dim is 514, above 512"),
        ({"kv_heads": 0}, "n_kv_heads: got 0"),
    ):
        blocks = tuple(
            dataclasses.replace(one, attention=dataclasses.replace(one.attention, **heads))
            for one in manifest.model.blocks
        )
        wrong = dataclasses.replace(manifest.model, blocks=blocks)
        with pytest.raises(ArtifactError, match=message):
            check_graph(PATH, model, dataclasses.replace(manifest, model=wrong))


def test_learned_positions_are_as_many_as_the_rows_have(tmp_path: Path) -> None:
    model, manifest = given("a16w8_gpt2", tmp_path)
    wrong = dataclasses.replace(manifest, seq_length=manifest.model.seq_length + 1)
    with pytest.raises(ArtifactError, match="positions"):
        check_graph(PATH, model, wrong)
