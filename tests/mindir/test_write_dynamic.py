"""The dynamic layout as files: what is written, and that it takes any number of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mindspore.train import serialization
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.backends.engines.graph_cell import GraphCellEngine
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.mindir.manifest import Graph, GraphName
from lite_runner.mindir.write_dynamic import export_dynamic
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.read_ahead import ReadAhead
from tests.models import reference_model
from tests.paths import FIXTURES

CASE = FIXTURES / "reference/llama"
KEY = b"0123456789abcdef"


def export(folder: Path, enc_key: bytes | None = None, length: int = 64) -> dict[GraphName, Graph]:
    model = reference_model("llama")
    weights = ReadAhead(open_checkpoint(CASE, model))
    return export_dynamic(
        model,
        weights,
        folder,
        "tiny",
        slots=2,
        seq_length=length,
        dtype="float32",
        enc_key=enc_key,
    )


def logits(folder: Path, graphs: dict[GraphName, Graph], dec_key: bytes | None = None):
    """After the prompts of the reference [prompts, vocab]."""
    paths = {name: folder / graph.file for name, graph in graphs.items()}
    engine = GraphCellEngine(paths, graphs, threads=None, dec_key=dec_key)
    expected = np.load(CASE / "expected.npz")
    answers = []
    for prompt, length in zip(expected["prompts"], expected["lengths"], strict=True):
        arrays = engine.bind("model", [(1, int(length)), (1,), (1,), (1,)])
        for array, value in zip(arrays, (prompt[:length], 0, length, 1), strict=True):
            array[...] = value
        answers.append(engine.run("model")[0][0])
    got, wanted = np.stack(answers), expected["logits"][:, 0]
    assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()
    return got


def test_one_file_with_named_inputs_and_any_length(tmp_path: Path) -> None:
    graphs = export(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny_graph.mindir"]
    model = ModelProto()
    model.ParseFromString((tmp_path / "tiny_graph.mindir").read_bytes())
    names = [one.name.rpartition(":")[2] for one in model.graph.input]
    assert names == [spec.name for spec in graphs["model"].inputs]
    assert [spec.shape for spec in graphs["model"].inputs] == [(1, -1), (1,), (1,), (1,)]
    logits(tmp_path, graphs)


def test_a_large_model_is_split_and_means_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "TOTAL_SAVE", 1)  # KB, in place of 1 GB
    graphs = export(tmp_path)
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert names == ["tiny_graph.mindir", "tiny_variables", "tiny_variables/data_0"]
    logits(tmp_path, graphs)


def test_encrypted(tmp_path: Path) -> None:
    graphs = export(tmp_path, KEY)
    assert b"embedding.weight" not in (tmp_path / "tiny_graph.mindir").read_bytes()
    logits(tmp_path, graphs, KEY)


def test_a_sequence_longer_than_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of 65 tokens, but the model supports at most 64"):
        export(tmp_path, length=65)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"cannot write tiny_graph\.mindir"):
        export(tmp_path / "file")
