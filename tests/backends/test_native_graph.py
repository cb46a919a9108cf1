"""Exported graphs of our own operators against the online backend of the same, bit for bit."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore.train.mind_ir_pb2 import ModelProto
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.backends.base import Row
from lite_runner.backends.batch_metadata import BatchMetadata
from lite_runner.backends.engines.start import EngineOptions
from lite_runner.backends.exported import open_exported
from lite_runner.backends.native import NativeBackend
from lite_runner.backends.native_graph import NativeGraphBackend
from lite_runner.config.quantization import CacheType, Quant, Quantization
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.mindir.manifest import Manifest, Operators
from lite_runner.mindir.operators import Stored
from lite_runner.mindir.write_native import export_native
from lite_runner.native.versions import FORMAT
from lite_runner.system import memory
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.backends.shared import check_generated

SLOTS, LENGTH = 3, 48
CAPACITY = 16  # below the longest prompt, which then comes in pieces
GRAPH_CELL = EngineOptions(name="graph-cell")
Reference = Callable[[str], Any]
Export = Callable[..., Manifest]


@pytest.fixture
def export(reference: Reference, manifest_of: Export) -> Export:
    def export(
        folder: Path, case: str, quant: Quant = "a16w8", cache: CacheType = "fp32"
    ) -> Manifest:
        known = reference(case)
        group = Quantization.of(quant, None).group
        operators = Operators(FORMAT, quant, group, cache, CAPACITY)
        graphs, operators = export_native(
            known.config,
            QuantizedWeights(known.tensors(quant), known.config),
            folder,
            case,
            slots=SLOTS,
            seq_length=LENGTH,
            operators=operators,
            inputs=BatchMetadata(known.config, LENGTH, CAPACITY).specs(SLOTS),
        )
        return manifest_of(case, "dynamic", graphs, SLOTS, LENGTH, operators=operators)

    return export


def test_texts_outgrow_longropes_short_factors(
    tmp_path: Path, reference: Reference, export: Export
) -> None:
    """In pieces, for the capacity of a step is less."""
    manifest = export(tmp_path, "phi3_longrope", "none")
    backend = open_exported(manifest.paths(tmp_path), manifest, GRAPH_CELL, slots=SLOTS)
    check_generated(reference("phi3_longrope"), backend)


def answers(backend: NativeBackend | NativeGraphBackend) -> NDArray[np.float32]:
    """Logits of three rows of different lengths together, of one alone, of the others."""
    tokens = np.random.default_rng(5).integers(0, 90, (SLOTS, 40)).astype(np.int32)
    lengths = (33, 4, 11)
    assert backend.forward([Row(0, tokens[0, :20], 0, logits=0)]).shape == (0, 96)
    found = [
        backend.forward([Row(1, tokens[1, :9], 0), Row(0, tokens[0, 20:30], 20, length=40)]),
        backend.forward([Row(slot, tokens[slot, :end], 0) for slot, end in enumerate(lengths)]),
        backend.forward([Row(1, tokens[1, 4:8], 4)]),
        backend.forward([Row(0, tokens[0, 33:34], 33), Row(2, tokens[2, 11:12], 11)]),
    ]
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("case", "quant", "cache"),
    [
        ("llama", "a16w8", "fp32"),
        ("llama_rope_dynamic", "a16w8", "fp16"),
        ("qwen2", "a8w8", "int8"),
        ("bloom", "a16w4", "fp32"),
        ("gpt2", "a16w8", "int8"),
        ("qwen3", "a16w4", "fp32"),
        ("mistral", "a16w8", "int8"),
        ("llama_biases", "a8w8", "fp16"),
    ],
)
def test_the_bits_are_the_online_ones(
    case: str,
    quant: Quant,
    cache: CacheType,
    tmp_path: Path,
    reference: Reference,
    export: Export,
) -> None:
    manifest = export(tmp_path, case, quant, cache)
    backend = open_exported(manifest.paths(tmp_path), manifest, GRAPH_CELL, slots=SLOTS)
    online = reference(case).fused(SLOTS, LENGTH, quant, cache=cache)
    assert np.array_equal(answers(backend), answers(online))
    assert backend.info.engine == "graph-cell" and backend.compile_s > 0


@pytest.mark.parametrize(
    ("case", "format"),
    [
        *(("llama", 1), ("llama_biases", 1), ("smollm3", 1), ("chatglm", 1), ("glm4", 3)),
        *(("qwen3", 2), ("mistral", 2), ("qwen2_window", 2)),
        *(("olmo2", 3), ("granite", 3), ("gemma2", 3), ("gemma3", 3), ("chatglm_6b", 3)),
        *(("qwen3_moe", 3), ("mixtral", 3)),
        *(("starcoder2", 2), ("gpt_neox", 3), ("gpt_neox_serial", 1)),
    ],
)
def test_layers_that_older_operators_do_not_know_are_of_a_newer_format(
    case: str, format: int, tmp_path: Path, export: Export
) -> None:
    """Which those refuse; what they would read stays of the first."""
    manifest = export(tmp_path, case)
    assert manifest.operators and manifest.operators.format == format


def test_moved_and_with_operators_at_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference, export: Export
) -> None:
    expected = answers(reference("llama").fused(SLOTS, LENGTH, "a16w8"))
    made, moved = tmp_path / "made", tmp_path / "moved to 别处"
    made.mkdir()
    manifest = export(made, "llama")
    files = [path for path in made.rglob("*") if path.is_file()]
    assert len(files) == 2
    for path in files:
        for place in (native.LIBRARY, native.LIBRARY.parents[2], tmp_path):
            assert str(place).encode() not in path.read_bytes()
    made.rename(moved)
    library = tmp_path / "elsewhere" / "ours.so"
    library.parent.mkdir()
    shutil.copy(native.LIBRARY, library)
    monkeypatch.setattr(native, "LIBRARY", library)
    backend = open_exported(manifest.paths(moved), manifest, GRAPH_CELL, slots=SLOTS)
    assert np.array_equal(answers(backend), expected)
    assert str(library) in Path("/proc/self/maps").read_text()


def test_without_the_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Export
) -> None:
    manifest = export(tmp_path, "llama")
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "operators.so")
    with pytest.raises(EnvironmentFault, match="which were not built") as caught:
        open_exported(manifest.paths(tmp_path), manifest, GRAPH_CELL, slots=1)
    assert "C++ compiler" in caught.value.hint


def test_with_operators_of_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Export, other_operators: Path
) -> None:
    manifest = export(tmp_path, "llama")
    monkeypatch.setattr(native, "LIBRARY", other_operators)
    with pytest.raises(EnvironmentFault, match="which were built from other sources") as caught:
        open_exported(manifest.paths(tmp_path), manifest, GRAPH_CELL, slots=1)
    assert "build_ext --inplace" in caught.value.hint


def test_what_it_was_not_exported_for(tmp_path: Path, export: Export) -> None:
    manifest = export(tmp_path, "llama")
    paths = manifest.paths(tmp_path)
    with pytest.raises(ConfigError, match="4 rows at once, but llama was exported for 3"):
        open_exported(paths, manifest, GRAPH_CELL, slots=SLOTS + 1)
    ascend = dataclasses.replace(GRAPH_CELL, device="Ascend")
    with pytest.raises(EnvironmentFault, match="run on CPU only; got Ascend"):
        open_exported(paths, manifest, ascend, slots=1)
    backend = open_exported(paths, manifest, GRAPH_CELL, slots=SLOTS)
    with pytest.raises(ConfigError, match="num_return_sequences"):
        backend.copy([0], [1])
    with pytest.raises(ValueError, match="token ids must be 0 to"):
        backend.forward([Row(0, np.array([backend.info.vocab_size], np.int32), 0)])


def test_more_than_the_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Export
) -> None:
    manifest = export(tmp_path, "llama")
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    monkeypatch.setattr(Stored, "read", lambda self: pytest.fail("read"))
    with pytest.raises(EnvironmentFault, match="memory: the run needs"):
        open_exported(manifest.paths(tmp_path), manifest, GRAPH_CELL, slots=1)


def test_parameters_that_are_not_those_of_the_graph(tmp_path: Path, export: Export) -> None:
    manifest = export(tmp_path, "llama")
    (path,) = manifest.paths(tmp_path).values()
    model = ModelProto()
    model.ParseFromString(path.read_bytes())
    for change, message in (
        (
            lambda: model.graph.parameter.add(name="x:one:more", data_type=2, dims=[1]),
            "not those of",
        ),
        (
            lambda: (model.graph.parameter.pop(), model.graph.parameter.pop(0)),
            "layer0: missing among its parameters",
        ),
    ):
        change()
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ArtifactError, match=message) as caught:
            open_exported(manifest.paths(tmp_path), manifest, GRAPH_CELL, slots=1)
        assert str(path) in caught.value.message


def test_a_manifest_that_is_not_of_the_graph(tmp_path: Path, export: Export) -> None:
    manifest = export(tmp_path, "llama")
    assert manifest.operators is not None
    other = dataclasses.replace(manifest.operators, capacity=CAPACITY + 1)
    for wrong, message in (
        (dataclasses.replace(manifest, operators=other), "output of Embedding: got float32"),
        (dataclasses.replace(manifest, seq_length=LENGTH - 1), "takes"),
        (dataclasses.replace(manifest, batch_size=SLOTS + 1), "keys0: got float32"),
    ):
        with pytest.raises(ArtifactError, match=rf"llama_graph\.mindir: {message}"):
            open_exported(manifest.paths(tmp_path), wrong, GRAPH_CELL, slots=1)
