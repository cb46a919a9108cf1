"""The networks against transformers' logits (tests/fixtures/reference) and against themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax

from lite_runner.backends import online
from lite_runner.backends.base import Row
from lite_runner.backends.online import OnlineBackend, OnlineOptions
from lite_runner.errors import EnvironmentFault
from lite_runner.weights.adapter import open_adapters
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.read_ahead import ReadAhead

REFERENCE = Path(__file__).parents[1] / "fixtures" / "reference"
CASES = sorted(path.name for path in REFERENCE.iterdir() if path.is_dir())
# float32 rounding over two layers; a wrong slope, scale or position is off by 1e-2 and more.
TOLERANCE = 1e-4


def backend(case: str, slots: int, length: int, **options: object) -> OnlineBackend:
    folder = REFERENCE / case
    config = model_config_of(folder)
    assert config is not None
    weights = ReadAhead(open_checkpoint(folder, config))
    return OnlineBackend(config, weights, OnlineOptions(slots=slots, length=length, **options))


def prompts_of(expected: dict[str, NDArray]) -> list[NDArray[np.int32]]:
    pairs = zip(expected["prompts"], expected["lengths"], strict=True)
    return [row[:length].astype(np.int32) for row, length in pairs]


def run(model: OnlineBackend, expected: dict[str, NDArray]) -> NDArray[np.float32]:
    """Logits [prompts, steps + 1, vocab]: all prompts together, then the forced tokens."""
    prompts, forced = prompts_of(expected), expected["continuations"].astype(np.int32)
    logits = [model.forward([Row(slot, prompt, 0) for slot, prompt in enumerate(prompts)])]
    for step in range(forced.shape[1]):
        rows = [
            Row(slot, forced[slot, step : step + 1], len(prompt) + step)
            for slot, prompt in enumerate(prompts)
        ]
        logits.append(model.forward(rows))
    return np.stack(logits, axis=1)


def relative_error(got: NDArray, expected: NDArray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("use_past", [True, False], ids=["cache", "no_cache"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, use_past: bool) -> None:
    expected = dict(np.load(REFERENCE / case / "expected.npz"))
    steps = expected["continuations"].shape[1]
    length = int(expected["lengths"].max()) + steps
    model = backend(case, len(expected["lengths"]), length, use_past=use_past)
    # With dynamic NTK the cached keys keep the rotation that they were written with.
    wanted = expected["logits"]
    if not use_past:
        wanted = expected.get("logits_no_cache", wanted)
    assert relative_error(run(model, expected), wanted) <= TOLERANCE


def test_float16_is_close() -> None:
    expected = dict(np.load(REFERENCE / "llama" / "expected.npz"))
    model = backend("llama", len(expected["lengths"]), 64, dtype="float16")
    error = relative_error(run(model, expected), expected["logits"])
    assert 1e-6 < error <= 1e-2  # rounded to 11 bits, and really so


@pytest.fixture(scope="module")
def model() -> OnlineBackend:
    """3 slots; what each test needs in them, it writes itself."""
    return backend("llama", 3, 100)


@pytest.fixture(scope="module")
def tokens() -> NDArray[np.int32]:
    return np.random.default_rng(5).integers(0, 90, 80).astype(np.int32)


def test_prefill_does_not_depend_on_the_other_rows(model: OnlineBackend, tokens: NDArray) -> None:
    alone = model.forward([Row(1, tokens[:30], 0)])
    others = [Row(0, tokens[:7], 0), Row(1, tokens[:30], 0), Row(2, tokens[3:60], 0)]
    assert np.array_equal(model.forward(others)[1], alone[0])


def test_decode_does_not_depend_on_the_other_rows(model: OnlineBackend, tokens: NDArray) -> None:
    model.forward([Row(slot, tokens[: 10 + slot], 0) for slot in range(3)])
    one = Row(1, tokens[20:21], 11)
    alone = model.forward([one])
    together = model.forward([Row(0, tokens[3:4], 10), one, Row(2, tokens[9:10], 12)])
    assert np.array_equal(together[1], alone[0])


def test_a_slot_that_sits_out_keeps_its_cache(model: OnlineBackend, tokens: NDArray) -> None:
    model.forward([Row(0, tokens[:20], 0), Row(1, tokens[:9], 0)])
    before = model.forward([Row(0, tokens[20:21], 20)])
    model.forward([Row(1, tokens[9:10], 9)])
    assert np.array_equal(model.forward([Row(0, tokens[20:21], 20)]), before)


def test_rows_may_come_in_any_order(model: OnlineBackend, tokens: NDArray) -> None:
    model.forward([Row(slot, tokens[: 10 + slot], 0) for slot in range(3)])
    rows = [Row(slot, tokens[20 + slot : 21 + slot], 10 + slot) for slot in range(3)]
    forward, backward = model.forward(rows), model.forward(rows[::-1])
    assert np.array_equal(forward, backward[::-1])


def test_a_prompt_in_chunks_equals_the_whole(model: OnlineBackend, tokens: NDArray) -> None:
    whole = model.forward([Row(0, tokens, 0)])
    model.forward([Row(2, tokens[:33], 0)])
    assert relative_error(model.forward([Row(2, tokens[33:], 33)]), whole) < 1e-5


def test_copy_reads_all_slots_before_it_writes(model: OnlineBackend, tokens: NDArray) -> None:
    model.forward([Row(0, tokens[:20], 0), Row(1, tokens[30:50], 0)])
    rows = [Row(slot, tokens[60:61], 20) for slot in (0, 1)]
    before = model.forward(rows)
    model.copy([1, 0], [0, 1])
    assert np.array_equal(model.forward(rows), before[::-1])


def test_copy_without_a_cache(tokens: NDArray) -> None:
    model = backend("gpt2", 2, 60, use_past=False)
    model.forward([Row(0, tokens[:20], 0), Row(1, tokens[30:50], 0)])
    rows = [Row(slot, tokens[60:61], 20) for slot in (0, 1)]
    before = model.forward(rows)
    model.copy([1, 0], [0, 1])
    model.forward(rows)
    assert relative_error(model.forward(rows), before[::-1]) < 1e-6


def test_an_absent_device_is_an_environment_fault() -> None:
    with pytest.raises(EnvironmentFault, match="device_target=Ascend"):
        backend("llama", 1, 10, device="Ascend")


@pytest.mark.parametrize("case", ["bloom_6_heads", "gpt2", "llama", "qwen2"])
def test_scores_equal_transformers(case: str) -> None:
    """The forced tokens' likelihood, by the logits that transformers gave before each of them."""
    expected = dict(np.load(REFERENCE / case / "expected.npz"))
    forced = expected["continuations"].astype(np.int32)
    model = backend(case, 1, 64)
    for index, prompt in enumerate(prompts_of(expected)):
        logits = log_softmax(expected["logits"][index, :-1].astype(np.float64), axis=-1)
        wanted = logits[np.arange(forced.shape[1]), forced[index]]
        got = model.scores(np.concatenate([prompt, forced[index]]))
        assert got.dtype == np.float64 and got.shape == (len(prompt) + forced.shape[1] - 1,)
        error = np.abs(got[len(prompt) - 1 :] - wanted).max()
        assert error <= TOLERANCE * np.abs(expected["logits"]).max()


@pytest.mark.parametrize("use_past", [True, False], ids=["cache", "no_cache"])
def test_scores_equal_the_logits_token_by_token(tokens: NDArray, use_past: bool) -> None:
    tokens, model = tokens[:40], backend("llama", 2, 40, use_past=use_past)
    rows = [model.forward([Row(0, tokens[:1], 0)])]
    rows += [model.forward([Row(0, tokens[at : at + 1], at)]) for at in range(1, len(tokens) - 1)]
    wanted = log_softmax(np.concatenate(rows).astype(np.float64), axis=-1)
    wanted = wanted[np.arange(len(tokens) - 1), tokens[1:]]
    assert np.abs(model.scores(tokens) - wanted).max() < 1e-5


def test_scores_in_chunks_equal_the_whole(
    model: OnlineBackend, tokens: NDArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.forward([Row(0, tokens[::-1].copy(), 0)])  # what was in the slot does not count
    whole = model.scores(tokens)
    monkeypatch.setattr(online, "rows_at_once", lambda *_: 16)
    assert np.abs(model.scores(tokens) - whole).max() < 1e-5
    assert np.abs(model.scores(tokens[:40]) - whole[:39]).max() < 1e-5
    assert len(model.scores(tokens[:2])) == 1


def test_adapters_leave_the_scores_alone(tokens: NDArray) -> None:
    folder = REFERENCE / "llama"
    config = model_config_of(folder)
    assert config is not None
    adapters = open_adapters(
        REFERENCE.parent / "adapters" / "llama" / "lora_adapter.json", config, ["all"]
    )
    weights = ReadAhead(open_checkpoint(folder, config))
    options = OnlineOptions(slots=2, length=100, loaded_adapters=1)
    with_pool = OnlineBackend(config, weights, options, list(adapters.values()))
    ids = tokens[:30]
    assert np.array_equal(with_pool.scores(ids), backend("llama", 2, 100).scores(ids))
