"""Calls of MindSpore Lite on Ascend, compared with the vendor's packages (lite.yaml).

Nothing here runs on a card.
"""

from __future__ import annotations

import gzip
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import yaml
from mindspore.train import mind_ir_pb2
from numpy.typing import NDArray

from lite_runner.backends.lite.engine import EngineOptions
from lite_runner.backends.lite.engines import lite_release
from lite_runner.backends.lite.engines.graph_cell import GraphCellEngine
from lite_runner.backends.lite.ge import SECTIONS, GeConfig, ge_config
from lite_runner.backends.mindspore import device
from lite_runner.config.argv import parse
from lite_runner.config.sections import ASCEND_CONFIG
from lite_runner.mindir.graph_inputs import arrays_of, inputs_named
from lite_runner.mindir.inspect import read_graph
from lite_runner.mindir.manifest import Graph, GraphName
from lite_runner.mindir.write_static_pair import export_static_pair, stems_of
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.read_ahead import ReadAhead
from tests.paths import FIXTURES

FACTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("lite.yaml").read_text("utf-8"))
BATCH, LENGTH = 2, 48


def sampled_pair(case: str, folder: Path) -> dict[GraphName, Graph]:
    reference = FIXTURES / "reference" / case
    model = model_config_of(reference)
    assert model is not None
    return export_static_pair(
        model,
        ReadAhead(open_checkpoint(reference, model)),
        folder,
        stems_of("tiny"),
        batch_size=BATCH,
        seq_length=LENGTH,
        dtype="float32",
        enc_key=None,
        sampled=True,
    )


def outputs_of(path: Path, batch: int) -> list[dict[str, Any]]:
    shown = []
    for one in read_graph(path).outputs:
        assert one.shape[0] == batch
        shown.append({"dtype": one.dtype, "shape": ["b", *one.shape[1:]]})
    return shown


def token_as_mindformers_reads(outputs: Sequence[NDArray[Any]]) -> list[int]:
    (reader,) = [one for one in FACTS["sampled graph"] if "tokens" in one]
    weights, tokens = outputs[reader["weights"]].astype(np.int32), outputs[reader["tokens"]]
    return [tokens[i][np.argmax(weights[i])] for i in range(len(weights))]


@pytest.mark.parametrize("case", ["bloom", "gpt2", "llama"])
def test_sampled_graphs_end_as_mindformers_own(case: str, tmp_path: Path) -> None:
    (writer,) = [one for one in FACTS["sampled graph"] if "outputs" in one]
    for graph in sampled_pair(case, tmp_path).values():
        assert outputs_of(tmp_path / graph.file, BATCH) == writer["outputs"]
    for name in ("sampled_prefill", "sampled_inc"):  # which the real MindFormers exported
        packed = FIXTURES / "mindformers" / "bloom" / "mindir" / f"{name}.mindir.gz"
        path = tmp_path / f"{name}.mindir"
        path.write_bytes(gzip.decompress(packed.read_bytes()))
        assert outputs_of(path, 1) == writer["outputs"]


def test_mindformers_infer_finds_the_token_in_ours(tmp_path: Path) -> None:
    graphs = sampled_pair("bloom", tmp_path)
    files = {name: tmp_path / graph.file for name, graph in graphs.items()}
    engine = GraphCellEngine(files, graphs, EngineOptions("graph-cell"))
    expected = np.load(FIXTURES / "reference" / "bloom" / "expected.npz")
    lengths, forced = expected["lengths"][:BATCH], expected["continuations"][:BATCH]
    ids = np.zeros((BATCH, LENGTH), np.int32)
    ids[:, : expected["prompts"].shape[1]] = expected["prompts"][:BATCH]
    order: tuple[GraphName, ...] = ("prefill", "increment", "increment")
    for step, name in enumerate(order):
        given = ids if step == 0 else forced[:, step - 1 : step]
        inputs = inputs_named([spec.name for spec in graphs[name].inputs])
        values = arrays_of(inputs, name, given, lengths + step, LENGTH)
        bound = engine.bind(name, [spec.shape for spec in graphs[name].inputs])
        for array, value in zip(bound, values, strict=True):
            array[...] = value
        wanted = expected["logits"][:BATCH, step].argmax(-1)
        assert token_as_mindformers_reads(engine.run(name)) == wanted.tolist()


def test_mindir_versions_of_lite_releases() -> None:
    for fact in FACTS["MindIR versions"]:
        last = lite_release.last_version(f"MindSpore Lite {fact['release']}")
        assert last in (fact["reads"], None)
        assert last is not None or fact["reads"] == max(mind_ir_pb2.Version.values())
    for version, first in lite_release.FIRST.items():
        of_release = [
            fact["reads"]
            for fact in FACTS["MindIR versions"]
            if str(fact["release"]).startswith(f"{first}.")
        ]
        assert of_release and min(of_release) == version


def test_the_groups_of_ge_are_the_documents() -> None:
    for fact in FACTS["GE options"]:
        if "group" not in fact:
            continue
        line = ["model=tiny_llama", "backend=mslite", "predict_data=x", f"ge={fact['group']}"]
        ge = ge_config(resolve(parse(line, heads()))[0].infer)
        wanted = {
            section: {name: str(value) for name, value in fact[section].items()}
            for section in ("ascend_context", "ge_session_options")
        }
        assert ge is not None and ge.sections == wanted


def test_every_section_that_lite_reads_is_known() -> None:
    for fact in FACTS["GE options"]:
        assert set(fact.get("sections", ())) <= set(SECTIONS)
        for name, value in fact.get("default", {}).items():
            assert any(name in text and value in text for text in GeConfig().unset())


def test_several_cards_get_their_rank_table_where_lite_looks_for_it() -> None:
    laid = GeConfig(rank_table="table.json").of_graph(0)
    found = [fact["rank table"] for fact in FACTS["GE options"] if "rank table" in fact]
    assert len(found) == 2
    for place in found:
        assert laid == {place["section"]: {place["key"]: "table.json"}}


def test_the_settings_of_a_card_are_those_of_the_installed_mindspore() -> None:
    """tests/backends/mindspore/test_device.py has the calls."""
    source = inspect.getsource(ms.context._Context.set_ascend_config)
    assert [name for name in ASCEND_CONFIG if f"'{name}':" not in source] == []
    assert "max_size" in inspect.signature(ms.runtime.set_memory).parameters
    assert callable(ms.device_context.ascend.op_precision.precision_mode)
    for fact in FACTS["memory and ascend_config"]:
        for name, value in fact.get("environment", {}).items():
            assert device.DEFAULTS[name] == value
