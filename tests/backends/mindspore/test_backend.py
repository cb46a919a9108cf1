"""The networks against transformers' logits (tests/fixtures/reference) and against themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax

from lite_runner.architectures import parameters
from lite_runner.backends import Row
from lite_runner.backends.mindspore import backend as mindspore
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.backends.native.backend import NativeBackend, NativeOptions
from lite_runner.errors import EnvironmentFault
from lite_runner.native.packed_model import pack
from lite_runner.weights import LazyTensor
from lite_runner.weights.lora.adapter import pool_size
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from tests import references
from tests.backends.shared import RowsKeepApart, check_generated
from tests.models import reference_model
from tests.paths import REFERENCE

BLENDS = references.blends()
DYNAMIC = "llama_rope_dynamic"
# Each compiles graphs. Those of longrope and of dynamic NTK are those that
# test_texts_outgrow_... and test_a_prompt_in_chunks_... have.
CASES = references.covering(
    references.of_graphs(),
    beside=[*BLENDS.values(), *map(reference_model, ("phi3_longrope", DYNAMIC))],
)
# The others compile that of a prompt alone: what their layers are of is the same in both.
STEPS = references.covering(references.of_graphs(), *references.POSITIONS)
# A cache changes positions and masks. Without one bloom is in test_growing.py.
POSITIONS = [DYNAMIC, "mistral", "chatglm_6b"]
# float32 rounding over two layers; a wrong slope, scale or position is off by 1e-2 and more.
TOLERANCE = 1e-4
Reference = Callable[[str], Any]
Error = Callable[[NDArray, NDArray], float]
Scores = Callable[[MindSporeBackend, NDArray], NDArray[np.float64]]


@pytest.mark.parametrize(
    ("case", "use_past"),
    [*((case, True) for case in CASES), *((case, False) for case in POSITIONS)],
)
def test_logits_equal_transformers(
    case: str, use_past: bool, reference: Reference, relative_error: Error
) -> None:
    known = reference(case)
    model = known.online(len(known.prompts), known.length, use_past=use_past)
    wanted = known.logits if use_past else known.logits_no_cache
    if use_past and case not in STEPS:
        assert relative_error(known.prefill(model), wanted[:, 0]) <= TOLERANCE
        return
    assert relative_error(known.run(model), wanted) <= TOLERANCE


@pytest.mark.parametrize("name", BLENDS)
def test_logits_of_blends_equal_those_of_the_native_kernels(
    name: str, relative_error: Error
) -> None:
    model, generator = BLENDS[name], np.random.default_rng(0)

    def lazy(shape: tuple[int, ...]) -> LazyTensor:
        """Weights, gains and biases that a graph without one of them would not be close with."""
        values = generator.normal(float(len(shape) == 1) / 2, 0.5, shape).astype(np.float32)
        return LazyTensor(shape, "F32", lambda: values)

    tensors = {one.name: lazy(one.shape) for one in parameters(model)}
    ids = generator.integers(3, model.vocab_size, 12, np.int32)
    rows = [Row(0, ids, 0), Row(1, ids[:5], 0)]
    layers = pack(model, QuantizedWeights(tensors, model))
    wanted = NativeBackend(model, layers, NativeOptions(slots=2, length=16)).forward(rows)
    graph = MindSporeBackend(model, ReadAhead(tensors), MindSporeOptions(slots=2, length=16))
    assert relative_error(graph.forward(rows), wanted) <= TOLERANCE


def test_texts_outgrow_longropes_short_factors(reference: Reference) -> None:
    known = reference("phi3_longrope")
    model = known.online(4, 48)
    check_generated(known, model)
    check_generated(known, model, beams=3)


def test_operators_one_by_one(reference: Reference, relative_error: Error) -> None:
    known = reference("gpt2")
    model = known.online(len(known.prompts), known.length, pynative=True)
    model.prepare()
    assert relative_error(known.run(model), known.logits) <= TOLERANCE
    assert ms.get_context("mode") == ms.PYNATIVE_MODE
    ms.set_context(mode=ms.GRAPH_MODE)


def test_float16_is_close(reference: Reference, relative_error: Error) -> None:
    known = reference("llama")
    model = known.online(len(known.prompts), 64, dtype="float16")
    error = relative_error(known.prefill(model), known.logits[:, 0])
    assert 1e-6 < error <= 1e-2  # rounded to 11 bits, and really so


@pytest.fixture(scope="module")
def model(reference: Reference) -> MindSporeBackend:
    """4 slots; what each test needs in them, it writes itself."""
    return reference("llama").online(4, 200, layers=1)


@contextmanager
def with_steps(model: MindSporeBackend, **sizes: int) -> Iterator[None]:
    """With other sizes of a step, by the names of their functions: its graphs take any."""
    assert model._network is not None
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(mindspore, name, lambda *_, size=size: size)
        model._configure(model._network, model._options)
        yield
    model._configure(model._network, model._options)


@pytest.fixture
def chunked(model: MindSporeBackend) -> Iterator[MindSporeBackend]:
    """The model, whose prompts are computed 32 tokens at a time."""
    with with_steps(model, chunk_length=32):
        yield model


@pytest.fixture(scope="module")
def uncached(reference: Reference) -> MindSporeBackend:
    """4 slots of the model's 64 positions, without a cache."""
    return reference("llama").online(4, 64, layers=1, use_past=False)


class TestRows(RowsKeepApart):
    pass


def test_a_window_over_chunks_and_in_more_room(reference: Reference, relative_error: Error) -> None:
    """Chunks shorter than the window and longer; and what a network of less room has become. One
    of its layers has a window, and the other sees all. With graphs it has grown: test_growing."""
    known = reference("qwen2_window")
    model, last = known.online(1, 12), len(known.prompts) - 1
    model.grow(len(known.prompts), known.length)
    assert relative_error(known.run(model), known.logits) <= TOLERANCE
    prompt = known.prompts[last]
    for start, end in ((0, 5), (5, 9), (9, len(prompt) - 2), (len(prompt) - 2, len(prompt))):
        logits = model.forward([Row(0, prompt[start:end], start)])
    assert relative_error(logits[0], known.logits[last, 0]) <= TOLERANCE


def test_copy_without_a_cache(
    tokens: NDArray, uncached: MindSporeBackend, relative_error: Error
) -> None:
    model = uncached
    model.forward([Row(0, tokens[:20], 0), Row(1, tokens[30:50], 0)])
    rows = [Row(slot, tokens[60:61], 20) for slot in (0, 1)]
    before = model.forward(rows)
    model.copy([1, 0], [0, 1])
    model.forward(rows)
    assert relative_error(model.forward(rows), before[::-1]) < 1e-6


def test_an_absent_device_is_an_environment_fault(reference: Reference) -> None:
    with pytest.raises(EnvironmentFault, match="device_target=Ascend"):
        reference("llama").online(1, 10, device="Ascend")


def test_scores_equal_transformers(reference: Reference, scores: Scores) -> None:
    """The forced tokens' likelihood, by the logits that transformers gave before each of them."""
    known = reference("qwen2_window")
    forced, model = known.forced, known.online(1, 64)
    for index, prompt in enumerate(known.prompts):
        logits = log_softmax(known.logits[index, :-1].astype(np.float64), axis=-1)
        wanted = logits[np.arange(forced.shape[1]), forced[index]]
        got = scores(model, np.concatenate([prompt, forced[index]]))
        assert got.dtype == np.float64 and got.shape == (len(prompt) + forced.shape[1] - 1,)
        error = np.abs(got[len(prompt) - 1 :] - wanted).max()
        assert error <= TOLERANCE * np.abs(known.logits).max()


@pytest.mark.parametrize("which", ["model", "uncached"])
def test_scores_equal_the_logits_token_by_token(
    tokens: NDArray, which: str, request: pytest.FixtureRequest, scores: Scores
) -> None:
    """Of a text that fills the context."""
    model: MindSporeBackend = request.getfixturevalue(which)
    tokens = tokens[: model.info.max_length]
    rows = [model.forward([Row(0, tokens[:1], 0)])]
    rows += [model.forward([Row(0, tokens[at : at + 1], at)]) for at in range(1, len(tokens) - 1)]
    wanted = log_softmax(np.concatenate(rows).astype(np.float64), axis=-1)
    wanted = wanted[np.arange(len(tokens) - 1), tokens[1:]]
    assert np.abs(scores(model, tokens) - wanted).max() < 1e-5


def test_scores_in_chunks_equal_the_whole(
    model: MindSporeBackend, tokens: NDArray, scores: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens[:80]
    model.forward([Row(0, tokens[::-1].copy(), 0)])  # what was in the slot does not count
    whole = scores(model, tokens)
    monkeypatch.setattr(model, "_compiled", {"score": model._compiled["score"]})
    with with_steps(model, rows_at_once=16):
        assert model.info.most_logits == 16
        assert np.abs(scores(model, tokens) - whole).max() < 1e-5
        assert np.abs(scores(model, tokens[:40]) - whole[:39]).max() < 1e-5
        assert len(scores(model, tokens[:2])) == 1
    assert list(model._compiled) == ["score"]  # which served the single token, too


def test_a_row_is_scored_by_its_adapter(
    model: MindSporeBackend, tokens: NDArray, reference: Reference, relative_error: Error
) -> None:
    known = reference("llama")
    adapters = open_adapters(
        REFERENCE.parent / "adapters" / "llama" / "lora_adapter.json", known.config, ["all"]
    )
    config = replace(known.config, blocks=known.config.blocks[:1])
    pairs = {name: pair for name, pair in adapters["all"].pairs.items() if ".layers.0." in name}
    adapter = replace(adapters["all"], pairs=pairs)
    options = MindSporeOptions(slots=3, length=200, lora=pool_size([adapter], 1))
    pool, plain = MindSporeBackend(config, ReadAhead(known.tensors()), options, [adapter]), model
    ids, base = tokens[:30], Row(0, tokens[:30], 0, logits=30)
    assert np.array_equal(pool.forward([base]), plain.forward([base]))
    assert pool.adapters is not None
    slot = pool.adapters.pin("all")
    scored = pool.forward([Row(0, ids, 0, slot, logits=30)])
    prompts = [Row(1, ids[: at + 1], 0, slot) for at in range(30)]
    wanted = np.concatenate([pool.forward([row]) for row in prompts])
    assert relative_error(scored, wanted) < 1e-5
    assert relative_error(scored, plain.forward([base])) > 1e-2


@pytest.mark.parametrize("which", ["chunked", "uncached"])
def test_rows_that_want_no_logits_one_and_many(
    which: str, tokens: NDArray, request: pytest.FixtureRequest, relative_error: Error
) -> None:
    model: MindSporeBackend = request.getfixturevalue(which)
    whole = model.forward([Row(3, tokens[:50], 0, logits=50)])
    assert whole.shape == (50, 96)
    assert model.forward([Row(0, tokens[:20], 0, logits=0)]).shape == (0, 96)
    model.forward([Row(1, tokens[:20], 0), Row(2, tokens[:40], 0)])
    rows = [
        Row(2, tokens[40:41], 40),
        Row(0, tokens[20:40], 20, logits=0),
        Row(1, tokens[20:21], 20, logits=0),
        Row(3, tokens[:50], 0, logits=3),
    ]
    wanted = whole[[40, 47, 48, 49]]
    assert relative_error(model.forward(rows), wanted) < 1e-5
    rows = [Row(0, tokens[40:50], 40), Row(1, tokens[21:22], 21), Row(3, tokens[50:51], 50)]
    assert relative_error(model.forward(rows)[:2], whole[[49, 21]]) < 1e-5


@pytest.mark.parametrize("which", ["chunked", "uncached"])
def test_a_slot_goes_on_from_an_earlier_position(
    which: str, tokens: NDArray, request: pytest.FixtureRequest
) -> None:
    """At a multiple of the chunk; to the bit. Later contents are dropped."""
    model: MindSporeBackend = request.getfixturevalue(which)
    new = np.concatenate([tokens[:32], tokens[50:70]])
    fresh = [model.forward([Row(1, new, 0)]), model.forward([Row(1, tokens[:1], 52)])]
    model.forward([Row(0, tokens[:58], 0)])
    model.forward([Row(0, tokens[:1], 58)])
    cut = [model.forward([Row(0, new[32:], 32, length=52)])]
    cut.append(model.forward([Row(0, tokens[:1], 52)]))
    assert np.array_equal(cut, fresh)


def test_a_prompt_in_chunks_is_to_the_bit_the_whole(
    chunked: MindSporeBackend, tokens: NDArray, reference: Reference, relative_error: Error
) -> None:
    """Chunks end at multiples of info.chunk; the last one is a single token. By dynamic NTK
    they are rotated by the length of the whole."""
    known = reference(DYNAMIC)
    dynamic = known.online(len(known.prompts), 100)
    assert relative_error(known.run(dynamic), known.logits) <= TOLERANCE
    with with_steps(dynamic, chunk_length=32):
        for model in (chunked, dynamic):
            assert model.info.chunk == 32 and model.info.can_continue == (model is chunked)
            whole = model.forward([Row(0, tokens[:65], 0)])
            for start, end in ((0, 32), (32, 64), (64, 65)):
                row = Row(1, tokens[start:end], start, logits=end == 65, length=65)
                last = model.forward([row])
            assert np.array_equal(last, whole)
            assert np.array_equal(
                model.forward([Row(1, tokens[:1], 65)]), model.forward([Row(0, tokens[:1], 65)])
            )
