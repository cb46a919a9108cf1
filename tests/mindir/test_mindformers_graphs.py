"""MindIR that the real MindFormers 1.0.2 exported: known by the roles of inputs and outputs, and
run where its release allows it. tests/fixtures/README.md says how the files were made."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.api.exported import sizes_in_graphs
from lite_runner.backends import Row
from lite_runner.backends.lite.engine import EngineOptions, choose_engine
from lite_runner.backends.lite.layouts import logits_of, open_exported
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir.inspect import foreign_manifest
from lite_runner.mindir.manifest import GraphName
from tests.paths import FIXTURES
from tests.sizes import ModelConfig

FIXTURES = FIXTURES / "mindformers"
Graphs = Callable[..., list[Path]]


@pytest.fixture
def graphs(tmp_path: Path) -> Graphs:
    """`graphs("bloom", "cache_prefill", ...)`: these files, unpacked."""

    def unpack(family: str, *names: str) -> list[Path]:
        paths = [tmp_path / f"{name}.mindir" for name in names]
        for path in paths:
            packed = FIXTURES / family / "mindir" / f"{path.name}.gz"
            path.write_bytes(gzip.decompress(packed.read_bytes()))
        return paths

    return unpack


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_layers": 2,
    "seq_length": 16,
    "norm_eps": 1e-5,
}
GPT = {"num_heads": 2, "n_kv_heads": 2, "head_dim": 8, "intermediate_size": 64}
LLAMA = {"num_heads": 4, "n_kv_heads": 2, "head_dim": 4, "intermediate_size": 24}
MODELS = {
    "bloom": ModelConfig("bloom", **SIZES, **GPT, tie_word_embeddings=True),
    "gpt2": ModelConfig("gpt2", **SIZES, **GPT, tie_word_embeddings=True),
    "llama": ModelConfig("llama", **SIZES, **LLAMA, tie_word_embeddings=False),
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [("bloom", "cache"), ("bloom", "sampled"), ("gpt2", "cache"), ("llama", "cache")],
)
def test_a_pair(graphs: Graphs, family: str, kind: str) -> None:
    """Inputs are input_position and batch_valid_length, of gpt2 [b, 1]; the increments' logits are
    [1, 1, V] of llama and gpt2, and a sampled token [1, 1] stands beside a float."""
    prefill, increment = graphs(family, f"{kind}_prefill", f"{kind}_inc")
    model = MODELS[family]
    manifest = foreign_manifest({"prefill": prefill, "increment": increment}, model, family)
    assert (manifest.layout, manifest.batch_size, manifest.seq_length) == ("static_pair", 1, 16)
    assert (manifest.sampled, manifest.versions) == (kind == "sampled", {"mindspore": "2.0.0"})
    inputs = manifest.graphs["increment"].inputs
    names = ["input_ids", "current_index", "init_reset", "valid_length"]
    assert [spec.name for spec in inputs] == names
    assert inputs[3].shape == ((1, 1) if family == "gpt2" else (1,))
    sizes = sizes_in_graphs(family, [prefill, increment])
    if "expand_ratio" in sizes:
        assert sizes.pop("expand_ratio") * model.hidden_size == model.intermediate_size
    assert sizes == {name: getattr(model, name) for name in sizes} and len(sizes) >= 4


def test_a_pair_of_another_family(graphs: Graphs) -> None:
    prefill, increment = graphs("bloom", "cache_prefill", "cache_inc")
    with pytest.raises(ArtifactError, match="which is a llama"):
        foreign_manifest({"prefill": prefill, "increment": increment}, MODELS["llama"], "x")


def test_a_graph_without_a_cache_runs_in_lite(graphs: Graphs, lite_python: Path) -> None:
    (path,) = graphs("bloom", "no_cache_prefill")
    sizes = sizes_in_graphs("bloom", [path])
    assert (sizes["num_heads"], sizes["num_layers"], sizes["expand_ratio"]) == (2, 2, 4)
    manifest = foreign_manifest({"model": path}, MODELS["bloom"], "x")
    assert (manifest.layout, manifest.sampled) == ("no_cache", False)
    options = EngineOptions(choose_engine("no_cache", None, "CPU"), threads=2)
    model = open_exported({"model": path}, manifest, options, slots=1)
    assert model.info.engine == "lite-worker"
    expected = np.load(FIXTURES / "bloom/expected.npz")
    for padded, length, tokens in zip(
        expected["prompts"], expected["lengths"], expected["tokens"], strict=True
    ):
        found = [model.forward([Row(0, padded[:length], 0)]).argmax()]
        for step, token in enumerate(tokens[:-1]):
            row = Row(0, np.array([token], np.int32), length + step)
            found.append(model.forward([row]).argmax())
        assert found == tokens.tolist()
    with pytest.raises(ConfigError, match="exported for sequences of 16"):
        model.forward([Row(0, np.ones(17, np.int32), 0)])
    model.close()


def test_mindspore_says_which_release_wrote_what_it_cannot_run(graphs: Graphs) -> None:
    prefill, increment = graphs("bloom", "cache_prefill", "cache_inc")
    paths: dict[GraphName, Path] = {"prefill": prefill, "increment": increment}
    manifest = foreign_manifest(paths, MODELS["bloom"], "x")
    with pytest.raises(ArtifactError, match=r"\(MindSpore 2\.0\.0 wrote it\)"):
        open_exported(paths, manifest, EngineOptions("graph-cell"), slots=1).prepare()


def test_outputs_of_graphs() -> None:
    """Logits of the last position only or of all, whatever stands beside; or tokens."""
    rows, positions, vocab = 2, 3, 5
    every = np.arange(rows * positions * vocab, dtype=np.float16).reshape(rows, positions, vocab)
    ids, mask = np.zeros((rows, positions), np.int32), np.ones((rows, positions), np.float32)
    last = np.array([0, 2], np.int32)
    wanted = every[[0, 1], last].astype(np.float32)
    for outputs in (
        [every, ids, mask],
        [every.reshape(-1, vocab), ids, mask],
        [wanted[:, None], ids],
        [wanted],
    ):
        np.testing.assert_array_equal(logits_of(outputs, rows, vocab, last), wanted)
    tokens = np.array([3, 1], np.int32)
    score = np.ones((rows, 1), np.float32)
    for outputs in ([tokens], [score, tokens[:, None]]):
        got = logits_of(outputs, rows, vocab, last)
        assert got.argmax(-1).tolist() == [3, 1] and got.sum() == rows
    with pytest.raises(ArtifactError, match=r"returns float32 \[2, 3\], expected logits of 5"):
        logits_of([mask], rows, vocab, last)
