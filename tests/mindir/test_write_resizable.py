"""Exporting the `resizable` layout; tests/backends/lite/test_layouts.py runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mindspore.train import mind_ir_pb2
from numpy.typing import NDArray

from lite_runner.backends.lite.engines.worker import WorkerEngine
from lite_runner.mindir.manifest import Graph
from lite_runner.mindir.write_resizable import export_resizable
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.read_ahead import ReadAhead
from tests.models import reference_model
from tests.paths import REFERENCE


def export(case: str, folder: Path, *, batch_size: int = 1, seq_length: int = 48) -> Graph:
    config = reference_model(case)
    tensors = open_checkpoint(REFERENCE / case, config)
    taken: list[str] = []
    weights = ReadAhead(tensors)

    def take(name: str) -> NDArray[np.float32]:
        taken.append(name)
        return weights(name)

    graphs = export_resizable(
        config, take, folder, "tiny", batch_size=batch_size, seq_length=seq_length
    )
    assert sorted(taken) == sorted(tensors)  # all of them, once
    assert list(graphs) == ["model"]
    return graphs["model"]


@pytest.mark.parametrize(
    ("case", "places", "batch_size"),
    [
        ("llama", {"cos": (-1, 8, 16), "sin": (-1, 8, 16)}, 1),
        ("llama_tied_mha", {"cos": (-1, 12, 8), "sin": (-1, 12, 8)}, 3),
        ("bloom", {}, 1),
        ("gpt2", {"positions": (-1,)}, 3),
        ("qwen3", {"cos": (-1, 12, 32), "sin": (-1, 12, 32)}, 1),
        # Layers with a window and layers without: a bias for either.
        ("qwen2_window", {"bias.1": (-1, 1, -1, -1), "cos": (-1, 8, 8), "sin": (-1, 8, 8)}, 3),
    ],
)
def test_the_description_equals_the_file(
    case: str, places: dict[str, tuple[int, ...]], batch_size: int, tmp_path: Path
) -> None:
    graph = export(case, tmp_path, batch_size=batch_size)
    assert [one.name for one in tmp_path.iterdir()] == ["tiny_graph.mindir"] == [graph.file]
    names = [spec.name for spec in graph.inputs]
    rows = ["tokens", "q_rows", "k_rows", "v_rows", "merge_rows", "last_rows", "bias"]
    layers = reference_model(case).num_layers
    past = [f"past_{kind}.{layer}" for layer in range(layers) for kind in "kv"]
    assert names == [*rows, *places, *past]
    assert {spec.name: spec.shape for spec in graph.inputs if spec.name in places} == places
    assert [spec.name for spec in graph.outputs] == ["logits", "new"]
    assert graph.outputs[0].shape == (-1, reference_model(case).vocab_size)

    model = mind_ir_pb2.ModelProto()
    model.ParseFromString((tmp_path / graph.file).read_bytes())
    types = {1: "float32", 6: "int32"}
    for spec, written in zip(graph.inputs, model.graph.input, strict=True):
        dims = tuple(written.tensor[0].dims)
        assert types[written.tensor[0].data_type] == spec.dtype, spec.name
        assert len(dims) == len(spec.shape), spec.name
        assert all(want in (-1, got) for want, got in zip(spec.shape, dims, strict=True)), spec.name
        # Traced for more than one token, or Lite computes wrong numbers of any other count.
        assert spec.name != "tokens" or dims == (2 * batch_size,)


def test_an_older_export_is_replaced(tmp_path: Path) -> None:
    export("llama", tmp_path)
    first = (tmp_path / "tiny_graph.mindir").read_bytes()
    graph = export("bloom", tmp_path)
    assert (tmp_path / graph.file).read_bytes() != first


def test_a_large_model_has_its_variables_apart(
    tmp_path: Path, lite_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = export("llama", tmp_path)
    monkeypatch.setattr("mindspore.train.serialization.TOTAL_SAVE", 1)  # KiB, in place of 1 GB
    apart = export("llama", tmp_path / "large")
    names = sorted(one.name for one in (tmp_path / "large").iterdir())
    assert names == ["tiny_graph.mindir", "tiny_variables"]
    logits = [
        first_logits(folder / graph.file, graph, lite_python)
        for folder, graph in ((tmp_path, whole), (tmp_path / "large", apart))
    ]
    assert np.array_equal(*logits)
    assert np.abs(logits[0]).max() > 0.01


def first_logits(path: Path, graph: Graph, python: Path) -> NDArray[np.float32]:
    """Of token 5 with all inputs that say where it stands zero."""
    engine = WorkerEngine({"model": path}, threads=1, python=python)
    shapes = [spec.shape for spec in engine.inputs["model"]]
    for array in (arrays := engine.bind("model", shapes)):
        array[:] = 0
    arrays[0][:] = 5
    logits = engine.run("model")[0].copy()
    engine.close()
    assert logits.shape[1:] == graph.outputs[0].shape[1:]
    return logits
