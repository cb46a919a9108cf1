"""The static pair as files: names, inputs, and the meaning of inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mindspore.train.mind_ir_pb2 import ModelProto
from numpy.typing import NDArray

from lite_runner.backends.lite.engine import EngineOptions
from lite_runner.backends.lite.engines.graph_cell import GraphCellEngine
from lite_runner.errors import ConfigError
from lite_runner.mindir.manifest import Graph, GraphName
from tests.mindir.conftest import BATCH, LENGTH, Export
from tests.paths import REFERENCE

NAMES = {
    "llama": ["input_ids", "valid_length", "batch_index", "zactivate_len"],
    "gpt2": ["input_ids", "current_index", "init_reset", "valid_length"],
}
SHAPES = {
    "input_ids": ((BATCH, LENGTH), "int32"),
    "valid_length": ((BATCH,), "int32"),
    "batch_index": ((BATCH,), "int64"),
    "zactivate_len": ((LENGTH,), "int64"),
    "current_index": ((BATCH,), "int32"),
    "init_reset": ((1,), "bool"),
}


def load(folder: Path, graphs: dict[GraphName, Graph]) -> GraphCellEngine:
    paths = {name: folder / graph.file for name, graph in graphs.items()}
    return GraphCellEngine(paths, graphs, EngineOptions("graph-cell"))


def run(
    engine: GraphCellEngine, graph: GraphName, specs: Graph, **values: object
) -> list[NDArray[np.generic]]:
    arrays = engine.bind(graph, [spec.shape for spec in specs.inputs])
    for array, spec in zip(arrays, specs.inputs, strict=True):
        array[...] = values[spec.name]
    return engine.run(graph)


@pytest.mark.parametrize("case", NAMES)
def test_names_and_inputs_are_those_of_mindformers(
    case: str, exported: Callable[..., Export]
) -> None:
    _, folder, graphs = exported(case)
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["tiny_inc_graph.mindir", "tiny_prefill_graph.mindir"]
    for name, graph in graphs.items():
        model = ModelProto()
        model.ParseFromString((folder / graph.file).read_bytes())
        inputs = {
            one.name.rpartition(":")[2]: tuple(one.tensor[0].dims) for one in model.graph.input
        }
        assert list(inputs) == NAMES[case]  # those that the graph does not read stay in it
        for spec in graph.inputs:
            shape, dtype = SHAPES[spec.name]
            if name == "increment" and spec.name == "input_ids":
                shape = (BATCH, 1)
            assert (spec.shape, spec.dtype, inputs[spec.name]) == (shape, dtype, shape)


def test_batch_index_says_whose_row_it_is(exported: Callable[..., Export]) -> None:
    _, folder, graphs = exported("llama", sampled=True)
    engine = load(folder, graphs)
    expected = np.load(REFERENCE / "llama" / "expected.npz")
    lengths, forced = expected["lengths"][:BATCH], expected["continuations"][:BATCH]
    ids = np.zeros((BATCH, LENGTH), np.int32)
    ids[:, : expected["prompts"].shape[1]] = expected["prompts"][:BATCH]
    # Row 0 is of slot 1 and row 1 of slot 0 while prefilling, then row i of slot i.
    got = [
        run(
            engine,
            "prefill",
            graphs["prefill"],
            input_ids=ids,
            valid_length=lengths,
            batch_index=[1, 0],
            zactivate_len=0,
        )[1]
    ]
    for step, order in enumerate(([0, 1], [1, 0], [0, 1])):
        rows = [1 - slot for slot in order]  # the prompt that is in the slot
        certain, answer = run(
            engine,
            "increment",
            graphs["increment"],
            input_ids=forced[rows, step : step + 1],
            valid_length=lengths[rows] + step + 1,
            batch_index=order,
            zactivate_len=0,
        )
        assert np.array_equal(certain, np.ones((BATCH, 1), np.float32))
        got.append(answer[rows])
    wanted = expected["logits"][:BATCH, :4].transpose(1, 0, 2)
    assert np.stack(got).dtype == np.int32
    assert np.array_equal(np.stack(got), wanted.argmax(-1)[..., None])


def test_a_sequence_longer_than_the_model(exported: Callable[..., Export], exports: Path) -> None:
    with pytest.raises(ConfigError, match="of 49 tokens, but the model supports at most 48"):
        exported("gpt2", seq_length=49)
    assert not list(exports.glob("gpt2*=49/*"))
