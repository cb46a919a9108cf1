"""Many adapters in one step: against peft's logits (tests/fixtures/adapters), against each adapter
merged into the weights by NumPy, and against a network that knows of none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures import may_untie, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import Row
from lite_runner.backends.fused import FusedBackend, FusedOptions
from lite_runner.backends.online import OnlineBackend, OnlineOptions
from lite_runner.errors import ArtifactError
from lite_runner.models import networks
from lite_runner.models.decoder import DecoderCell
from lite_runner.weights.adapter import Adapter, LoraPair, open_adapters
from lite_runner.weights.adapter_sites import sites
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.tensor import DType, LazyTensor

FIXTURES = Path(__file__).parents[1] / "fixtures"
FAMILIES = ("bloom", "gpt2", "llama", "qwen2")
TOLERANCE = 1e-4  # as without adapters; a wrong scale or rank is off by 1e-2 and more
Weights = Mapping[str, NDArray[np.float32]]
Error = Callable[[NDArray, NDArray], float]


def base_of(family: str) -> tuple[Decoder, Weights]:
    folder = FIXTURES / "reference" / family
    model = model_config_of(folder)
    assert model is not None
    tensors = open_checkpoint(folder, model)
    return model, {name: tensor.float32() for name, tensor in tensors.items()}


def backend(
    model: Decoder,
    weights: Weights,
    adapters: Sequence[Adapter] = (),
    *,
    slots: int = 6,
    places: int = 64,
    dtype: str = "float32",
    use_past: bool = True,
    fused: bool = False,
    rounded: bool = False,
) -> OnlineBackend | FusedBackend:
    if fused:
        own = FusedOptions(slots=slots, length=16, loaded_adapters=places, round_adapters=rounded)
        return FusedBackend(model, InMemory(model, weights), own, adapters)
    options = OnlineOptions(
        slots=slots, length=16, dtype=dtype, use_past=use_past, loaded_adapters=places
    )
    return OnlineBackend(model, lambda name: weights[name].copy(), options, adapters)


class InMemory:
    """Weights as the fused networks take them."""

    def __init__(self, model: Decoder, weights: Weights) -> None:
        self._weights = weights
        self._turned = {one.name for one in parameters(model) if one.layout == "in_out"}

    def matrix(self, name: str) -> NDArray[np.float32]:
        values = self._weights[name]
        return np.ascontiguousarray(values.T if name in self._turned else values)

    def vector(self, name: str) -> NDArray[np.float32]:
        return self._weights[name]


def run(
    network: OnlineBackend | FusedBackend,
    prompts: NDArray[np.int32],
    forced: NDArray[np.int32],
    adapters: Sequence[int],
) -> NDArray[np.float32]:
    """Logits [prompts, forced + 1, vocab]."""
    rows = [Row(slot, prompt, 0, adapters[slot]) for slot, prompt in enumerate(prompts)]
    logits = [network.forward(rows)]
    for step in range(forced.shape[1]):
        rows = [
            Row(slot, forced[slot, step : step + 1], prompts.shape[1] + step, adapters[slot])
            for slot in range(len(prompts))
        ]
        logits.append(network.forward(rows))
    return np.stack(logits, axis=1)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(
            (family, way)
            for way in ({}, {"fused": True})
            for family in (*FAMILIES, "qwen3", "mistral")
        ),
        ("llama", {"use_past": False}),
    ],
    ids=str,
)
def test_every_adapter_and_mixed_batches_equal_peft(
    family: str, way: dict[str, bool], relative_error: Error
) -> None:
    expected = dict(np.load(FIXTURES / "adapters" / family / "expected.npz"))
    model, weights = base_of(family)
    adapters = list(open_adapters(FIXTURES / "adapters" / family, model).values())
    prompts, forced = expected["prompts"], expected["continuations"]
    network = backend(model, weights, adapters, **way)
    plain = run(backend(model, weights, **way), prompts, forced, [0] * len(prompts))
    for number, wanted in enumerate(expected["logits"]):
        got = run(network, prompts, forced, [number] * len(prompts))
        assert relative_error(got, wanted) <= TOLERANCE, number
        assert np.array_equal(got, plain) == (number == 0)
    for mixed, wanted in zip(expected["mixed_adapters"], expected["mixed_logits"], strict=True):
        got = run(network, prompts, forced, mixed)
        assert relative_error(got, wanted) <= TOLERANCE
        assert (mixed == 0).any()
        assert got[mixed == 0].tobytes() == plain[mixed == 0].tobytes()


def random_adapter(
    model: Decoder, seed: int, rank: int, share: float, dtype: DType = "F32"
) -> Adapter:
    """For about `share` of all places for an adapter. Embedding and head are among them where
    they can be merged: bloom and gpt2 have no head of its own."""
    random = np.random.default_rng(seed)

    def tensor(*shape: int) -> LazyTensor:
        values = (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        if dtype == "F32":
            return LazyTensor(shape, dtype, lambda: values)
        halves = (values.view(np.uint32) >> 16).astype(np.uint16)
        return LazyTensor(shape, dtype, lambda: halves)

    def scale() -> float:
        return float(random.uniform(0.2, 1)) if dtype == "F32" else 0.5

    ends = () if may_untie(model) else (sites(model)[0].weight, "lm_head.weight")
    places = [site for site in sites(model) if site.weight not in ends]
    chosen = [site for site in places if random.random() < share]
    pairs = {
        site.weight: LoraPair(tensor(rank, site.width_in), tensor(site.width_out, rank), scale())
        for site in chosen
    }
    return Adapter(f"random_{seed}", Path(), pairs)


def merged(model: Decoder, weights: Weights, adapter: Adapter) -> tuple[Decoder, Weights]:
    """W + scale B A in float64; a tied head of llama becomes one of its own."""
    places = {site.weight: site for site in sites(model)}
    changed = {name: values.astype(np.float64) for name, values in weights.items()}
    if may_untie(model) and model.tie_word_embeddings:
        model = replace(model, tie_word_embeddings=False)
        changed["lm_head.weight"] = changed[sites(model)[0].weight].copy()
    for name, pair in adapter.pairs.items():
        product = pair.b.float32().astype(np.float64) @ pair.a.float32() * pair.scale
        changed[name] = changed[name] + (product.T if places[name].in_out else product)
    alone: Weights = {name: values.astype(np.float32) for name, values in changed.items()}
    return model, alone


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_equals_each_adapter_merged_and_run_alone(
    family: str, fused: bool, relative_error: Error
) -> None:
    model, weights = base_of(family)
    parts = ((1, 1.0), (64, 0.5))
    adapters = [random_adapter(model, seed, *part) for seed, part in enumerate(parts)]
    assert len({frozenset(adapter.pairs) for adapter in adapters}) == 2
    random = np.random.default_rng(7)
    prompts = random.integers(0, model.vocab_size, (3, 5)).astype(np.int32)
    forced = random.integers(0, model.vocab_size, (3, 3)).astype(np.int32)
    order = [2, 0, 1]
    network = backend(model, weights, adapters, slots=3, fused=fused)
    got = run(network, prompts, forced, order)
    for slot, number in enumerate(order):
        if number:
            model_alone, merged_weights = merged(model, weights, adapters[number - 1])
            alone = backend(model_alone, merged_weights, slots=1, use_past=False)
            wanted = run(alone, prompts[slot : slot + 1], forced[slot : slot + 1], [0])
            assert relative_error(got[slot], wanted[0]) <= TOLERANCE, number


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rows_bits_do_not_depend_on_its_neighbours(family: str) -> None:
    """Rows of one adapter go through the operators together."""
    model, weights = base_of(family)
    adapters = [random_adapter(model, seed, 7, 0.8) for seed in (1, 2)]
    network = backend(model, weights, adapters, slots=6, fused=True)
    tokens = np.random.default_rng(3).integers(0, model.vocab_size, (6, 5)).astype(np.int32)
    order = [1, 1, 1, 1, 2, 1]
    rows = [Row(slot, tokens[slot], 0, number) for slot, number in enumerate(order)]
    together = network.forward(rows)
    assert together.tobytes() == b"".join(network.forward([row]).tobytes() for row in rows)
    cut = [replace(row, tokens=row.tokens[:2]) for row in rows]
    network.forward(cut)
    rest = [replace(row, tokens=row.tokens[2:], position=2) for row in rows]
    assert network.forward(rest).tobytes() == together.tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_adapters_are_the_same_in_half_the_memory(
    family: str, relative_error: Error
) -> None:
    model, weights = base_of(family)
    halves = [random_adapter(model, 1, 1, 1.0, "BF16"), random_adapter(model, 2, 9, 0.5, "BF16")]
    assert len({frozenset(adapter.pairs) for adapter in halves}) == 2
    prompts = np.arange(15, dtype=np.int32).reshape(3, 5)
    logits, sizes = [], []
    for adapters in (halves, [as_float32(adapter) for adapter in halves]):
        network = backend(model, weights, adapters, slots=3, fused=True)
        logits.append(run(network, prompts, prompts[:, :2], [2, 0, 1]))
        assert network.adapters is not None
        sizes.append(network.adapters.nbytes)
    assert sizes[0] * 2 == sizes[1]
    assert relative_error(logits[0], logits[1]) <= 1e-6


def test_rounded_adapters_are_the_nearest_in_bfloat16(relative_error: Error) -> None:
    model, weights = base_of("llama")
    adapters = [random_adapter(model, 1, 3, 0.75), random_adapter(model, 2, 9, 2.0)]
    prompts = np.arange(15, dtype=np.int32).reshape(3, 5)

    def logits(adapters: list[Adapter], *, rounded: bool) -> NDArray[np.float32]:
        network = backend(model, weights, adapters, slots=3, fused=True, rounded=rounded)
        return run(network, prompts, prompts[:, :2], [2, 0, 1])

    found = logits(adapters, rounded=True)
    nearest = logits([nearest_bfloat16(adapter) for adapter in adapters], rounded=False)
    exact = logits(adapters, rounded=False)
    assert relative_error(found, nearest) <= 1e-6
    # A and B are off by 2 ** -9 of themselves at most, each, in both layers one behind the other.
    assert 1e-4 < relative_error(found[[0, 2]], exact[[0, 2]]) <= 2 * 2 * 2**-9
    np.testing.assert_array_equal(found[1], exact[1])  # the base model's row


def nearest_bfloat16(adapter: Adapter) -> Adapter:
    """A and scale * B as MindSpore rounds them, in float32."""

    def nearest(tensor: LazyTensor, factor: float) -> LazyTensor:
        values = ms.Tensor(tensor.float32() * np.float32(factor))
        halves = values.astype(ms.bfloat16).astype(ms.float32).asnumpy()
        return LazyTensor(tensor.shape, "F32", lambda: halves)

    pairs = {
        name: LoraPair(nearest(pair.a, 1.0), nearest(pair.b, pair.scale), 1.0)
        for name, pair in adapter.pairs.items()
    }
    return replace(adapter, pairs=pairs)


def as_float32(adapter: Adapter) -> Adapter:
    def whole(tensor: LazyTensor) -> LazyTensor:
        return LazyTensor(tensor.shape, "F32", tensor.float32)

    pairs = {
        name: LoraPair(whole(pair.a), whole(pair.b), pair.scale)
        for name, pair in adapter.pairs.items()
    }
    return replace(adapter, pairs=pairs)


def test_float16_is_close(relative_error: Error) -> None:
    expected = dict(np.load(FIXTURES / "adapters" / "llama" / "expected.npz"))
    model, weights = base_of("llama")
    adapters = list(open_adapters(FIXTURES / "adapters" / "llama", model).values())
    network = backend(model, weights, adapters, dtype="float16")
    mixed = expected["mixed_adapters"][0]
    got = run(network, expected["prompts"], expected["continuations"], mixed)
    assert 1e-6 < relative_error(got, expected["mixed_logits"][0]) <= 2e-2


def test_a_prompt_of_one_token_and_one_in_chunks(relative_error: Error) -> None:
    model, weights = base_of("llama")
    adapters = [random_adapter(model, 5, 4, 1.0)]
    network = backend(model, weights, adapters)
    tokens = np.arange(3, 13, dtype=np.int32)
    whole = network.forward([Row(0, tokens, 0, 1)])
    network.forward([Row(1, tokens[:1], 0, 1)])
    assert relative_error(network.forward([Row(1, tokens[1:], 1, 1)]), whole) < 1e-5
    plain = backend(model, weights)
    one = network.forward([Row(2, tokens[:1], 0, 0)])
    assert np.array_equal(one, plain.forward([Row(2, tokens[:1], 0, 0)]))


def test_a_network_that_takes_no_adapters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = base_of("llama")
    monkeypatch.setattr(
        networks,
        "DecoderCell",
        lambda model, weights, options: DecoderCell(model, weights, replace(options, lora=None)),
    )
    with pytest.raises(ArtifactError, match="this network takes none for 16 of their 16 weights"):
        backend(model, weights, [random_adapter(model, 1, 2, 1.0)])
