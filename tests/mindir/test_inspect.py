"""Inspecting a MindIR without a manifest, and refusing some. Files are MindSpore's own."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train.mind_ir_pb2 import ModelProto, TensorProto

from lite_runner.architectures import architecture_of
from lite_runner.backends import Row
from lite_runner.backends.lite.engine import EngineOptions
from lite_runner.backends.lite.layouts import open_exported
from lite_runner.errors import ArtifactError
from lite_runner.mindir import inspect, write_static_pair
from lite_runner.mindir.inspect import foreign_manifest, read_graph
from lite_runner.mindir.manifest import GraphName, TensorSpec
from lite_runner.mindir.skim import read_model
from tests import references
from tests.each import each
from tests.mindir.conftest import BATCH, LENGTH, Export
from tests.models import reference_model
from tests.sizes import resized


def paths(one: Export) -> dict[GraphName, Path]:
    return {name: one[1] / graph.file for name, graph in one[2].items()}


def changed(source: Path, target: Path, change: Callable[[Any], object]) -> Path:
    """A copy of a MindIR whose protobuf was changed."""
    model = ModelProto.FromString(source.read_bytes())
    change(model)
    target.write_bytes(model.SerializeToString())
    return target


@pytest.mark.parametrize("case", ["bloom", "llama", "gpt2", "qwen3"])
def test_a_pair_is_known_by_its_graphs(exported: Callable[..., Export], case: str) -> None:
    one = exported(case)
    manifest = foreign_manifest(paths(one), one[0], "tiny")
    assert (manifest.layout, manifest.batch_size, manifest.seq_length) == (
        "static_pair",
        BATCH,
        LENGTH,
    )
    for name, graph in one[2].items():  # what the export itself says of them
        assert manifest.graphs[name].inputs == graph.inputs
        assert manifest.graphs[name].file == graph.file
        (output,) = manifest.graphs[name].outputs
        assert (output.shape, output.dtype) == ((BATCH, one[0].vocab_size), "float32")
    assert (manifest.sampled, manifest.model_type, manifest.precision) == (
        False,
        "MINDIR",
        "float32",
    )
    assert manifest.versions == {"mindspore": ms.__version__}


def test_graphs_that_sample_and_graphs_in_float16(exported: Callable[..., Export]) -> None:
    one = exported("gpt2", sampled=True)
    assert foreign_manifest(paths(one), one[0], "tiny").sampled
    half = exported("qwen3", dtype="float16")
    assert foreign_manifest(paths(half), half[0], "tiny").precision == "float16"
    mixed = {"prefill": paths(one)["prefill"], "increment": paths(exported("gpt2"))["increment"]}
    with pytest.raises(ArtifactError, match="returns tokens, the other logits"):
        foreign_manifest(mixed, one[0], "tiny")


def test_graphs_with_the_token_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exported: Callable[..., Export]
) -> None:
    """As this project wrote them before its sampled graphs had MindFormers' two outputs."""

    def token_alone(self: Any, logits: Any) -> Any:
        return self.argmax(logits)

    monkeypatch.setattr(write_static_pair._StaticStep, "output", token_alone)
    one = exported("gpt2", sampled=True, dtype="float32", seq_length=LENGTH - 1)
    manifest = foreign_manifest(paths(one), one[0], "tiny")
    assert manifest.sampled and manifest.graphs["prefill"].outputs[0].shape == (BATCH,)
    backend = open_exported(paths(one), manifest, EngineOptions("graph-cell"), slots=BATCH)
    answer = backend.forward([Row(0, np.array([5, 7], np.int32), 0)])
    assert answer.sum() == 1.0 and answer.shape == (1, one[0].vocab_size)


@pytest.mark.parametrize("case", ["bloom", "llama", "gpt2", "qwen2_window"])
def test_a_resizable_graph(exported: Callable[..., Export], case: str) -> None:
    one = exported(case, "resizable")
    manifest = foreign_manifest(paths(one), one[0], "tiny")
    assert (manifest.layout, manifest.seq_length) == ("resizable", one[0].seq_length)
    assert manifest.graphs["model"].inputs == one[2]["model"].inputs
    assert len(manifest.graphs["model"].outputs) == len(one[2]["model"].outputs)
    with pytest.raises(ArtifactError, match=r"unknown layout\n.*takes \(Parameter_\d+ int32"):
        more = resized(one[0], num_layers=one[0].num_layers + 1)
        foreign_manifest(paths(one), more, "tiny")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 99}, r"expected logits \[2, 99\]"),
        ({"hidden_size": 96}, "hidden_size: got 32, expected 96"),
        ({"num_layers": 3}, "num_layers: got 2, expected 3"),
        ({"n_kv_heads": 4}, "elements of a layer's cache"),
        ({"intermediate_size": 100}, "elements of a feed-forward weight"),
        ({"qkv_has_bias": True}, "qkv_has_bias: got False, expected True"),
        ({"family": "bloom"}, "which is a bloom"),
    ],
)
def test_a_pair_of_another_model(
    exported: Callable[..., Export], sizes: Mapping[str, Any], message: str
) -> None:
    one = exported("llama")
    with pytest.raises(ArtifactError, match=message):
        foreign_manifest(paths(one), resized(one[0], **sizes), "other")


def test_pairs_that_do_not_belong_together(exported: Callable[..., Export]) -> None:
    one = exported("qwen3")
    pair = paths(one)
    with pytest.raises(ArtifactError, match="swapped"):
        turned = {"prefill": pair["increment"], "increment": pair["prefill"]}
        foreign_manifest(turned, one[0], "tiny")
    for name in ("prefill", "increment"):
        with pytest.raises(ArtifactError, match=f"only one of a pair, its {name} graph"):
            foreign_manifest({"model": pair[name]}, one[0], "tiny")
    other = paths(exported("qwen3", seq_length=40))["increment"]
    with pytest.raises(ArtifactError, match=r"zactivate_len int64 \[40\]"):
        foreign_manifest({**pair, "increment": other}, one[0], "tiny")
    half = paths(exported("qwen3", dtype="float16"))["increment"]
    with pytest.raises(ArtifactError, match=r"float16 .* but .* float32 .*different exports"):
        foreign_manifest({**pair, "increment": half}, one[0], "tiny")


def test_names_of_the_inputs(exported: Callable[..., Export], tmp_path: Path) -> None:
    """Any prefix, or none of the names: then order and types decide."""
    one = exported("llama")

    def pair(rename: Callable[[str], str]) -> dict[GraphName, Path]:
        def change(model: Any) -> None:
            for tensor in model.graph.input:
                tensor.name = rename(tensor.name.rpartition(":")[2])

        copies = {}
        for name, path in paths(one).items():
            copies[name] = changed(path, tmp_path / path.name, change)
        return copies

    for rename in ("7_8.network.{}".format, "x{}".format):
        manifest = foreign_manifest(pair(rename), one[0], "tiny")
        assert [spec.name for spec in manifest.graphs["prefill"].inputs] == [
            "input_ids",
            "valid_length",
            "batch_index",
            "zactivate_len",
        ]
    turned = {"batch_index": "zactivate_len", "zactivate_len": "batch_index"}
    with pytest.raises(ArtifactError, match="unknown layout"):
        foreign_manifest(pair(lambda name: turned.get(name, name)), one[0], "tiny")


def test_tensors_in_mindformers_names(exported: Callable[..., Export], tmp_path: Path) -> None:
    """A weight with a canonical name has the shape that the model gives it, prefix or not."""
    one = exported("llama")

    def pair(*shape: int) -> dict[GraphName, Path]:
        def change(model: Any) -> None:
            tensor = model.graph.parameter.add()
            tensor.name = "1_2:backbone.model.layers.1.attention.wk.weight"
            tensor.dims.extend(shape)

        copies = {}
        for name, path in paths(one).items():
            copies[name] = changed(path, tmp_path / path.name, change)
        return copies

    model = one[0]
    right = (model.n_kv_heads * model.head_dim, model.hidden_size)
    assert foreign_manifest(pair(*right), model, "tiny").layout == "static_pair"
    with pytest.raises(ArtifactError, match=r"wk.weight: got \(7, 64\)"):
        foreign_manifest(pair(7, 64), model, "tiny")


def test_reading_leaves_the_weights_out(exported: Callable[..., Export]) -> None:
    for layout in ("static_pair", "resizable"):
        for path in paths(exported("bloom", layout)).values():
            whole = ModelProto.FromString(path.read_bytes())  # protobuf's own reading
            got = read_model(path)
            assert list(got.graph.input) == list(whole.graph.input)
            assert list(got.graph.output) == list(whole.graph.output)
            assert [(one.name, one.dims, one.data_type) for one in got.graph.parameter] == [
                (one.name, one.dims, one.data_type) for one in whole.graph.parameter
            ]
            assert not any(one.raw_data for one in got.graph.parameter)
            assert got.mind_ir_version == whole.mind_ir_version


def test_invalid_mindirs(exported: Callable[..., Export], tmp_path: Path) -> None:
    good = paths(exported("bloom"))["prefill"]
    content = good.read_bytes()
    bad = tmp_path / "bad.mindir"
    for broken in (b"", b"# text", content[:-1], content[: len(content) // 2], b"\xff" * 64):
        bad.write_bytes(broken)
        with pytest.raises(ArtifactError, match="not a MindIR"):
            read_graph(bad)
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        read_graph(tmp_path / "missing.mindir")

    def later(model: Any) -> None:
        model.mind_ir_version = 99

    with pytest.raises(ArtifactError, match="MindIR version 99"):
        read_graph(changed(good, bad, later))


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_encrypted(tmp_path: Path, mode: str) -> None:
    network, example = nn.Dense(2, 2), Tensor(np.zeros((1, 2), np.float32))
    stem, key = str(tmp_path / "x"), b"0123456789abcdef"
    ms.export(network, example, file_name=stem, file_format="MINDIR", enc_key=key, enc_mode=mode)
    with pytest.raises(ArtifactError, match="encrypted, and without a manifest"):
        read_graph(tmp_path / "x.mindir")


def test_another_network(tmp_path: Path) -> None:
    example = Tensor(np.zeros((1, 2), np.float32))
    ms.export(nn.Dense(2, 2), example, file_name=str(tmp_path / "x"), file_format="MINDIR")
    with pytest.raises(ArtifactError, match=r"x.mindir takes \(\w+ float32 \[1, 2\]\)\n  expected"):
        foreign_manifest({"model": tmp_path / "x.mindir"}, reference_model("llama"), "tiny")


@pytest.mark.parametrize(
    ("shape", "sampled"), [((2,), True), ((6, 1), True), ((2, 3, 1), True), ((1, 6), None)]
)
def test_tokens_may_be_those_of_every_position(
    shape: tuple[int, ...], sampled: bool | None
) -> None:
    output = SimpleNamespace(dtype="int32", shape=shape)
    graph: Any = SimpleNamespace(path="x.mindir", outputs=[output])
    if sampled:
        assert inspect._samples(graph, 2, reference_model("llama"))
    else:
        with pytest.raises(ArtifactError, match=r"returns int32 \[1, 6\], expected logits"):
            inspect._samples(graph, 2, reference_model("llama"))


def test_inputs_of_any_size_or_none(tmp_path: Path) -> None:
    """Nothing is made in the sizes that a file gives before they are known to be in bounds."""
    path = tmp_path / "x.mindir"

    def given(*inputs: tuple[int, tuple[int, ...]]) -> ArtifactError:
        model = ModelProto()
        for index, (dtype, shape) in enumerate(inputs):
            tensor = model.graph.input.add(name=f"x{index}").tensor.add(data_type=dtype)
            tensor.dims.extend(shape)
        model.graph.input.add(name="no tensor")
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ArtifactError) as caught:
            foreign_manifest({"model": path}, reference_model("llama"), "tiny")
        return caught.value

    ids = (TensorProto.INT32, (1, 1))
    for last in ((2**33,), (2**62, 1), (0,), (-1,), ()):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert "unknown layout" in given(ids, (TensorProto.INT64, last)).message
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB
    assert "one without inputs" in given().message


def test_no_model_lacks_what_graphs_are_compared_with() -> None:
    """Those that have experts alone have no feed-forward weight."""
    for case in references.every():
        assert not inspect.mismatches(reference_model(case), (), cache_rows=8), case


def test_a_name_of_millions_of_dots() -> None:
    """Quadratic work would take minutes."""
    model = reference_model("llama")
    end = "model.layers.1.attention.wq.weight"
    names = ["." * 10**6, "." * 10**6 + end]
    (error,) = inspect.mismatches(
        model, [TensorSpec(name, (7, 64), "float32") for name in names], cache_rows=None
    )
    assert error.endswith(f"{end}: got (7, 64), expected (64, 32)")


@each(
    ("name", "shape", "message"),
    [
        ("embedding.weight", (10, 0), "sizes cannot be inferred"),
        ("embedding.weight", (-1, 32), "sizes cannot be inferred"),
        ("blocks.0.values", (), "number of heads cannot be inferred"),
        ("blocks.0.values", (2, 4, 48, 0), "number of heads cannot be inferred"),
    ],
)
def test_sizes_of_a_damaged_graph(name: str, shape: tuple[int, ...], message: str) -> None:
    shapes = {
        "embedding.weight": (96, 32),
        "blocks.0.values": (2, 2, 48, 8),
        "blocks.0.w1.weight": (64, 32),
        "blocks.0.wk.weight": (16, 32),
    }
    architecture = architecture_of(reference_model("llama"))

    def specs() -> list[TensorSpec]:
        return [TensorSpec(one, size, "float32") for one, size in shapes.items()]

    assert inspect.sizes_of(architecture, specs(), ())["num_heads"] == 4
    shapes[name] = shape
    with pytest.raises(ArtifactError, match=message):
        inspect.sizes_of(architecture, specs(), ())
