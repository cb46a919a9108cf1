"""The static pair against transformers' logits, in MindSpore's own runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends import Row
from lite_runner.backends.lite.engine import EngineOptions
from lite_runner.backends.lite.engines.graph_cell import GraphCellEngine
from lite_runner.backends.lite.layouts import StaticPairBackend
from lite_runner.errors import ConfigError
from lite_runner.mindir.manifest import GraphName, Manifest
from tests.backends.shared import TOLERANCE, LikeTransformers
from tests.models import reference_model

BATCH, LENGTH = 4, 48
Make = Callable[..., StaticPairBackend]
Reference = Callable[[str], Any]
Error = Callable[[NDArray, NDArray], float]


@pytest.fixture(scope="module")
def make(exported_pair: Callable[..., tuple[Manifest, dict[GraphName, Path]]]) -> Make:
    @functools.cache  # compiling a pair takes two seconds
    def build(case: str, *, sampled: bool = False) -> StaticPairBackend:
        length = min(LENGTH, reference_model(case).seq_length)
        manifest, paths = exported_pair(case, BATCH, length, sampled=sampled)
        engine = GraphCellEngine(paths, manifest.graphs, EngineOptions("graph-cell"))
        return StaticPairBackend(manifest, engine)

    return build


@pytest.fixture(scope="module")
def model(make: Make) -> StaticPairBackend:
    return make("bloom")


@pytest.fixture(scope="module")
def tokens(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    return tokens[:LENGTH]


class TestLogits(LikeTransformers):
    @pytest.mark.parametrize("case", LikeTransformers.CASES)
    def test_some_rows_in_another_order(
        self, case: str, make: Make, reference: Reference, relative_error: Error
    ) -> None:
        """Over earlier contents of the slots."""
        known, backend = reference(case), make(case)
        known.run(backend)
        assert relative_error(known.run(backend, [3, 0, 2]), known.logits[:3]) <= TOLERANCE


def test_a_pair_that_samples_gives_the_token(make: Make, reference: Reference) -> None:
    known = reference("gpt2")
    logits = known.run(make("gpt2", sampled=True))
    assert np.array_equal(logits.argmax(-1), known.logits.argmax(-1))
    assert np.array_equal(np.unique(logits), [0, 1])


def test_a_slot_that_sits_out_keeps_its_cache(model: StaticPairBackend, tokens: NDArray) -> None:
    def steps(between: Callable[[], object]) -> NDArray[np.float32]:
        model.forward([Row(1, tokens[:20], 0)])
        model.forward([Row(1, tokens[20:21], 20)])
        between()
        return model.forward([Row(1, tokens[21:22], 21)])

    def others() -> None:
        model.forward([Row(0, tokens[:35], 0), Row(2, tokens[7:9], 0)])
        model.forward([Row(2, tokens[9:10], 2)])
        model.prepare()

    assert np.array_equal(steps(others), steps(lambda: None))


def test_a_row_does_not_depend_on_the_others(model: StaticPairBackend, tokens: NDArray) -> None:
    one = [Row(1, tokens[:30], 0), Row(1, tokens[30:31], 30)]
    alone = [model.forward([row]) for row in one]
    first = model.forward([Row(2, tokens[3:33], 0), one[0], Row(0, tokens[:7], 0)])
    second = model.forward([Row(2, tokens[33:34], 30), one[1]])
    assert np.array_equal(first[1], alone[0][0])
    assert np.array_equal(second[1], alone[1][0])


def test_a_new_prompt_beside_running_rows(model: StaticPairBackend, tokens: NDArray) -> None:
    wanted_new = model.forward([Row(0, tokens[:9], 0)])
    model.forward([Row(1, tokens[:20], 0)])
    wanted_old = model.forward([Row(1, tokens[20:21], 20)])
    both = model.forward([Row(1, tokens[20:21], 20), Row(0, tokens[:9], 0)])
    assert np.array_equal(both, np.concatenate([wanted_old, wanted_new]))


def test_rows_that_want_no_logits(model: StaticPairBackend, tokens: NDArray) -> None:
    whole = [Row(1, tokens[:20], 0), Row(0, tokens[:9], 0)]
    wanted = model.forward(whole)
    rows = [Row(1, tokens[:20], 0, logits=0), Row(0, tokens[:9], 0)]
    assert np.array_equal(model.forward(rows), wanted[1:])
    both = model.forward([Row(1, tokens[20:21], 20), Row(0, tokens[9:10], 9)])
    rows = [Row(1, tokens[20:21], 20), Row(0, tokens[9:10], 9, logits=0)]
    assert np.array_equal(model.forward(rows), both[:1])


def test_a_prompt_in_pieces_equals_the_whole(model: StaticPairBackend, tokens: NDArray) -> None:
    whole = model.forward([Row(0, tokens[:20], 0), Row(1, tokens[:25], 0)])
    model.forward([Row(0, tokens[:15], 0), Row(1, tokens[:22], 0)])
    in_pieces = model.forward([Row(0, tokens[15:20], 15), Row(1, tokens[22:25], 22)])
    assert np.abs(in_pieces - whole).max() <= 1e-5 * np.abs(whole).max()


def test_a_row_may_fill_its_slot_but_not_more(model: StaticPairBackend, tokens: NDArray) -> None:
    assert model.info.max_length == LENGTH
    full = model.forward([Row(0, tokens, 0)])
    model.forward([Row(0, tokens[:-1], 0)])
    last = model.forward([Row(0, tokens[-1:], LENGTH - 1)])
    assert np.abs(last - full).max() <= 1e-5 * np.abs(full).max()
    with pytest.raises(ConfigError, match=r"a row of 49 tokens, .* for sequences of 48"):
        model.forward([Row(0, np.zeros(49, np.int32), 0)])
    with pytest.raises(ConfigError, match="a row of 49 tokens"):
        model.forward([Row(0, tokens[:1], LENGTH)])


def test_beams_need_another_layout(model: StaticPairBackend) -> None:
    with pytest.raises(ConfigError, match="static_pair") as caught:
        model.copy([0], [1])
    assert "resizable" in caught.value.hint
