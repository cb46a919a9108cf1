"""The `resizable` layout in the true MindSpore Lite, against transformers and against itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends import Row
from lite_runner.backends.lite.engines.worker import WorkerEngine
from lite_runner.backends.lite.layouts import NoCacheBackend, ResizableBackend, chunks, decode_span
from lite_runner.errors import ArtifactError
from lite_runner.mindir.graph_inputs import COMMON, dynamic_inputs, not_resizable, specs_of
from lite_runner.mindir.manifest import Graph, Manifest
from lite_runner.mindir.write_resizable import export_resizable
from lite_runner.weights.read_ahead import ReadAhead
from tests import references
from tests.backends.shared import RowsKeepApart, check_generated
from tests.models import reference_model

CASES = references.covering(
    [case for case in references.of_graphs() if not not_resizable(reference_model(case))]
)
TOLERANCE = 1e-4  # of the largest logit; see backends/mindspore/test_backend.py
Reference = Callable[[str], Any]
Error = Callable[[NDArray, NDArray], float]
Export = Callable[[str, Path, int], Manifest]


@pytest.fixture(scope="module")
def exported(reference: Reference, manifest_of: Callable[..., Manifest]) -> Export:
    def export(case: str, folder: Path, seq_length: int) -> Manifest:
        known = reference(case)
        weights = ReadAhead(known.tensors())
        graphs = export_resizable(
            known.config, weights, folder, case, batch_size=1, seq_length=seq_length
        )
        return manifest_of(case, "resizable", graphs, 1, seq_length)

    return export


def opened(
    manifest: Manifest, folder: Path, python: Path, slots: int, threads: int = 2
) -> ResizableBackend:
    paths = {name: folder / graph.file for name, graph in manifest.graphs.items()}
    return ResizableBackend(manifest, WorkerEngine(paths, threads=threads, python=python), slots)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str,
    tmp_path: Path,
    lite_python: Path,
    exported: Export,
    reference: Reference,
    relative_error: Error,
) -> None:
    known = reference(case)
    manifest = exported(case, tmp_path, known.length)
    model = opened(manifest, tmp_path, lite_python, len(known.prompts))
    logits = known.run(model)
    model.close()
    assert relative_error(logits, known.logits) <= TOLERANCE


def test_texts_outgrow_longropes_short_factors(
    tmp_path: Path, lite_python: Path, exported: Export, reference: Reference
) -> None:
    known = reference("phi3_long")
    model = opened(exported("phi3_long", tmp_path, 48), tmp_path, lite_python, 3)
    check_generated(known, model)
    check_generated(known, model, beams=3)
    model.close()


@pytest.fixture(scope="module", params=["bloom", "qwen2_window"])
def model(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    lite_python: Path,
    exported: Export,
) -> Iterator[ResizableBackend]:
    """3 slots of 200 tokens; what each test needs in them, it writes itself."""
    folder = tmp_path_factory.mktemp("resizable")
    backend = opened(exported(request.param, folder, 200), folder, lite_python, 3)
    yield backend
    backend.close()


class TestRows(RowsKeepApart):
    pass


def test_token_by_token_equals_the_whole_across_resizes(
    model: ResizableBackend, tokens: NDArray, relative_error: Error
) -> None:
    for at in range(150):
        last = model.forward([Row(1, tokens[at : at + 1], at)])
    assert relative_error(last, model.forward([Row(0, tokens[:150], 0)])) < 1e-5


def test_a_long_prompt_is_computed_in_chunks(
    model: ResizableBackend, tokens: NDArray, monkeypatch: pytest.MonkeyPatch, relative_error: Error
) -> None:
    whole = model.forward([Row(0, tokens[:65], 0)])
    monkeypatch.setattr("lite_runner.backends.lite.layouts.chunk_length", lambda heads, start: 32)
    # The last of three chunks is a single token.
    assert relative_error(model.forward([Row(1, tokens[:65], 0)]), whole) < 1e-5


@pytest.mark.parametrize("heads", [9, 32, 71])
def test_pieces_meet_at_multiples_of_a_chunk(heads: int) -> None:
    whole = list(chunks(heads, 0, 9001))
    assert len({count for _, count in whole[:-1]}) > 2  # they grow shorter
    assert sum(count for _, count in whole) == 9001
    for size in (512, 2048):
        cut = [
            piece
            for start in range(0, 9001, size)
            for piece in chunks(heads, start, min(start + size, 9001))
        ]
        assert cut == whole


def test_rows_that_want_no_logits(model: ResizableBackend, tokens: NDArray) -> None:
    wanted = model.forward([Row(0, tokens[:40], 0), Row(1, tokens[:9], 0), Row(2, tokens[:5], 0)])
    rows = [Row(0, tokens[:40], 0), Row(1, tokens[:9], 0, logits=0), Row(2, tokens[:5], 0)]
    assert np.array_equal(model.forward(rows), wanted[[0, 2]])
    last = model.forward([Row(0, tokens[:1], 40), Row(1, tokens[:1], 9)])
    rows = [Row(0, tokens[:1], 40, logits=0), Row(1, tokens[:1], 9)]
    assert np.array_equal(model.forward(rows), last[1:])


def test_a_slot_goes_on_from_an_earlier_position(
    model: ResizableBackend, tokens: NDArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a multiple of the chunk; to the bit. Later contents are dropped."""
    monkeypatch.setattr("lite_runner.backends.lite.layouts.chunk_length", lambda heads, keys: 32)
    new = np.concatenate([tokens[:32], tokens[50:83]])
    fresh = [model.forward([Row(1, new, 0)]), model.forward([Row(1, tokens[:1], 65)])]
    model.forward([Row(0, tokens[:90], 0)])
    model.forward([Row(0, tokens[:1], 90)])
    # The last piece is a single token.
    cut = [model.forward([Row(0, new[32:], 32)]), model.forward([Row(0, tokens[:1], 65)])]
    assert np.array_equal(cut, fresh)


def test_a_chunk_is_rotated_by_the_length_of_its_text(
    tmp_path: Path, lite_python: Path, exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamic NTK; to the bit, as the whole prompt, whose last piece is a single token."""
    monkeypatch.setattr("lite_runner.backends.lite.layouts.chunk_length", lambda heads, keys: 16)
    manifest = exported("llama_rope_dynamic", tmp_path, 60)
    model = opened(manifest, tmp_path, lite_python, 2)
    assert not model.info.can_continue
    tokens = np.arange(33, dtype=np.int32)
    whole = model.forward([Row(0, tokens, 0)])
    for start, end in ((0, 16), (16, 32), (32, 33)):
        row = Row(1, tokens[start:end], start, logits=end == 33, length=33)
        last = model.forward([row])
    model.close()
    assert np.array_equal(last, whole)


@pytest.mark.parametrize("length", [63, 64])
def test_a_slot_can_be_filled_to_its_end(
    tmp_path: Path,
    lite_python: Path,
    tokens: NDArray,
    length: int,
    exported: Export,
    relative_error: Error,
) -> None:
    model = opened(exported("llama", tmp_path, length), tmp_path, lite_python, 2)
    model.forward([Row(0, tokens[: length - 2], 0)])
    for at in (length - 2, length - 1):
        last = model.forward([Row(0, tokens[at : at + 1], at)])
    model.copy([0], [1])
    again = model.forward([Row(1, tokens[length - 1 : length], length - 1)])
    assert np.array_equal(again, last)
    assert relative_error(model.forward([Row(0, tokens[:length], 0)]), last) < 1e-5
    model.close()


def test_a_thread_more_changes_nothing_of_weight(
    tmp_path: Path, lite_python: Path, tokens: NDArray, exported: Export, relative_error: Error
) -> None:
    manifest = exported("gpt2", tmp_path, 48)
    logits = []
    for threads in (1, 3):
        backend = opened(manifest, tmp_path, lite_python, 1, threads)
        logits.append(backend.forward([Row(0, tokens[:40], 0)]))
        backend.close()
    assert relative_error(logits[1], logits[0]) < 1e-6


class NoEngine:
    """An engine that has nothing to run."""

    name = "none"

    def bind(self, graph: str, shapes: object) -> list[NDArray]:
        raise AssertionError

    def run(self, graph: str) -> list[NDArray]:
        raise AssertionError

    def close(self) -> None:
        pass


def test_a_graph_of_another_layout_is_refused(tmp_path: Path, exported: Export) -> None:
    manifest = exported("llama", tmp_path, 48)
    graph = manifest.graphs["model"]
    other = replace(manifest, graphs={"model": Graph(graph.file, graph.inputs[1:], ())})
    with pytest.raises(
        ArtifactError, match=r"not those of the model: .*q_rows.* expected .*tokens"
    ):
        ResizableBackend(other, NoEngine(), 1)


def test_a_copy_while_shorter_rows_decode_is_whole(manifest_of: Callable[..., Manifest]) -> None:
    """A decode binds the cache as far as its rows reach alone; the slot goes on behind that."""
    config = reference_model("llama")

    class Engine(NoEngine):
        """Each key and value is its token."""

        def bind(self, graph: str, shapes: Any) -> list[NDArray]:
            self.bound = [np.zeros(shape, np.float32) for shape in shapes]
            return self.bound

        def run(self, graph: str) -> list[NDArray]:
            rows = self.bound[-1].shape[0]
            new = self.bound[0].reshape(rows, 1, -1, 1)
            heads = config.num_layers * 2 * config.n_kv_heads
            shape = (rows, heads, new.shape[2], config.head_dim)
            return [np.zeros((rows, config.vocab_size)), np.broadcast_to(new, shape)]

    graph = Graph("x.ms", dynamic_inputs(config), ())
    engine = Engine()
    model = ResizableBackend(manifest_of("llama", "resizable", {"model": graph}, 1, 200), engine, 3)
    tokens = np.arange(1, 151, dtype=np.int32) % 90
    model.forward([Row(0, tokens, 0), Row(1, tokens[:4], 0)])
    model.forward([Row(1, tokens[:1], 4)])  # 63 positions are bound
    model.copy([0, 1], [2, 0])
    for slot, length, text in ((2, 150, tokens), (0, 5, [1, 2, 3, 4, 1])):
        model.forward([Row(slot, tokens[:2], length)])
        for past in engine.bound[-2 * config.num_layers :]:
            assert np.array_equal(past[0, 0, :, 0], text)


@pytest.mark.parametrize(("position", "span"), [(0, 64), (62, 64), (63, 128), (1000, 1024)])
def test_spans_are_few(position: int, span: int) -> None:
    assert decode_span(position) == span


def test_a_graph_without_a_cache_is_compiled_before_its_first_step(
    manifest_of: Callable[..., Manifest],
) -> None:
    """Once, with padding, and not as a part of the step."""
    seen: list[list[int]] = []

    class Engine(NoEngine):
        def bind(self, graph: str, shapes: Any) -> list[NDArray]:
            self.bound = [np.zeros(shape, np.int32) for shape in shapes]
            return self.bound

        def run(self, graph: str) -> list[NDArray]:
            seen.append(self.bound[0][0, :3].tolist())
            return [np.zeros((1, 96), np.float32)]

    graph = Graph("x.mindir", specs_of(COMMON, "prefill", 1, 8), ())
    model = NoCacheBackend(manifest_of("bloom", "full", {"model": graph}, 1, 8), Engine())
    assert not seen
    model.prepare()
    model.prepare()
    assert seen == [[0, 0, 0]] and model.compile_s > 0
    model.forward([Row(0, np.array([4, 5], np.int32), 0)])
    assert seen[1:] == [[4, 5, 0]]
