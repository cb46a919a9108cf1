"""The dynamic layout against transformers' logits, in MindSpore's own runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends.base import Row
from lite_runner.backends.dynamic import DynamicBackend
from lite_runner.backends.engines.graph_cell import GraphCellEngine
from lite_runner.errors import ConfigError
from lite_runner.mindir.manifest import Manifest
from lite_runner.mindir.write_dynamic import export_dynamic
from lite_runner.weights.read_ahead import ReadAhead
from tests.backends.shared import LikeTransformers

SLOTS, LENGTH = 4, 48
Make = Callable[..., DynamicBackend]
Reference = Callable[[str], Any]
ManifestOf = Callable[..., Manifest]


@pytest.fixture(scope="module")
def make(
    tmp_path_factory: pytest.TempPathFactory, reference: Reference, manifest_of: ManifestOf
) -> Make:
    @functools.cache  # an export takes a second, compiling another
    def build(case: str) -> DynamicBackend:
        known = reference(case)
        folder = tmp_path_factory.mktemp(case)
        graphs = export_dynamic(
            known.config,
            ReadAhead(known.tensors()),
            folder,
            case,
            slots=SLOTS,
            seq_length=LENGTH,
            dtype="float32",
            enc_key=None,
        )
        paths = {name: folder / graph.file for name, graph in graphs.items()}
        engine = GraphCellEngine(paths, graphs, threads=None, dec_key=None)
        return DynamicBackend(manifest_of(case, "dynamic", graphs, SLOTS, LENGTH), engine, SLOTS)

    return build


@pytest.fixture(scope="module")
def model(make: Make) -> DynamicBackend:
    return make("llama")


class TestLogits(LikeTransformers):
    pass


def test_slots_keep_apart_and_prompts_may_come_in_pieces(
    model: DynamicBackend, tokens: NDArray[np.int32]
) -> None:
    tokens = tokens[:40]
    whole = model.forward([Row(0, tokens, 0)])
    model.forward([Row(2, tokens[:13], 0)])
    model.forward([Row(1, tokens[5:30], 0)])
    in_pieces = model.forward([Row(2, tokens[13:], 13)])
    assert np.abs(in_pieces - whole).max() <= 1e-5 * np.abs(whole).max()


def test_a_chunk_is_rotated_by_the_length_of_its_text(make: Make, model: DynamicBackend) -> None:
    """Dynamic NTK; and rows that want no logits have none."""
    stretched = make("llama_rope_dynamic")
    assert model.info.can_continue and not stretched.info.can_continue
    tokens = np.arange(40, dtype=np.int32)
    whole = stretched.forward([Row(0, tokens, 0)])
    found = [
        stretched.forward([Row(1, tokens[:16], 0, logits=0, length=40)]),
        stretched.forward([Row(1, tokens[16:], 16, length=40), Row(2, tokens, 0, logits=0)]),
    ]
    assert [len(one) for one in found] == [0, 1]
    assert np.abs(found[1] - whole).max() <= 1e-5 * np.abs(whole).max()


def test_preparing_again_leaves_the_cache_alone(model: DynamicBackend) -> None:
    tokens = np.arange(20, dtype=np.int32)
    model.forward([Row(0, tokens, 0)])
    before = model.forward([Row(0, tokens[:1], 20)])
    model.prepare()
    assert np.array_equal(model.forward([Row(0, tokens[:1], 20)]), before)


def test_more_rows_than_were_exported(manifest_of: ManifestOf) -> None:
    class Unused:
        name = "unused"

    manifest = manifest_of("llama", "dynamic", {}, SLOTS, LENGTH)
    with pytest.raises(ConfigError, match="5 rows at once, but llama was exported for 4"):
        DynamicBackend(manifest, Unused(), SLOTS + 1)


def test_beams_need_another_layout(model: DynamicBackend) -> None:
    with pytest.raises(ConfigError, match="num_return_sequences") as caught:
        model.copy([0], [1])
    assert "resizable" in caught.value.hint
