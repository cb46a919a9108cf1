"""Many adapters in one step: against peft's logits (tests/fixtures/adapters), against each adapter
merged into the weights by NumPy, and against a network that knows of none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from lite_runner.architectures import can_untie_head, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import BASE, Row
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.networks import decoder
from lite_runner.networks.decoder import DecoderCell
from lite_runner.weights import DType, LazyTensor
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.lora.adapter import Adapter, LoraPair, LoraSize, pool_size, sites
from lite_runner.weights.lora.adapter_reader import open_adapters
from tests.paths import FIXTURES

FAMILIES = ("bloom", "gpt2", "llama", "qwen2")
# The native kernels for all; graphs are compiled of one whose head is its embedding and whose
# matrices are held [in, out], and of one with a head of its own.
FUSED_AND_COMPILED = [*((family, True) for family in FAMILIES), ("gpt2", False), ("llama", False)]
LLAMA_LIKE = ("olmo2", "granite", "smollm3_window", "gemma2", "gemma3", "phi3")
LAYER_NORM = ("starcoder2", "gpt_neox")
SPARSE = ("qwen3_moe", "mixtral")
# Compiled with adapters alone, and for a prompt alone: their linear layers are llama's, and those
# of the others are also compared with the graphs of a network that knows of none, to the bit.
LIKE_OTHERS = ("gpt_neox", "mixtral")
TOLERANCE = 1e-4  # as without adapters; a wrong scale or rank is off by 1e-2 and more
Weights = Mapping[str, NDArray[np.float32]]
Error = Callable[[NDArray, NDArray], float]


def base_of(family: str, *, compiled: bool = False) -> tuple[Decoder, Weights]:
    """A reference model, of one layer to compile graphs of: adapters are placed by layer, and two
    layers are compiled where the logits are compared with peft's."""
    folder = FIXTURES / "reference" / family
    model = model_config_of(folder)
    assert model is not None
    tensors = open_checkpoint(folder, model)
    if compiled:
        model = replace(model, blocks=model.blocks[:1])
    return model, {name: tensors[name].float32() for name in expected_tensors(model)}


def backend(
    model: Decoder,
    weights: Weights,
    adapters: Sequence[Adapter] = (),
    *,
    slots: int = 6,
    dtype: str = "float32",
    use_past: bool = True,
    fused: bool = False,
    rounded: bool = False,
    lora: LoraSize | None = None,
) -> MindSporeBackend | NativeBackend:
    if adapters and lora is None:
        lora = pool_size(adapters, len(adapters), rounded=rounded)
    if fused:
        own = NativeOptions(slots=slots, length=16, lora=lora)
        return NativeBackend(model, pack(model, InMemory(model, weights), lora), own, adapters)
    options = MindSporeOptions(slots=slots, length=16, dtype=dtype, use_past=use_past, lora=lora)
    return MindSporeBackend(model, lambda name: weights[name].copy(), options, adapters)


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
    network: MindSporeBackend | NativeBackend,
    prompts: NDArray[np.int32],
    forced: NDArray[np.int32],
    names: Sequence[str | None],
) -> NDArray[np.float32]:
    """Logits [prompts, forced + 1, vocab], of each prompt by the adapter of its name."""
    found = [BASE if name is None else pinned(network, name) for name in names]
    rows = [Row(slot, prompt, 0, found[slot]) for slot, prompt in enumerate(prompts)]
    logits = [network.forward(rows)]
    for step in range(forced.shape[1]):
        rows = [
            Row(slot, forced[slot, step : step + 1], prompts.shape[1] + step, found[slot])
            for slot in range(len(prompts))
        ]
        logits.append(network.forward(rows))
    for name in names:
        if name is not None and network.adapters is not None:
            network.adapters.unpin(name)
    return np.stack(logits, axis=1)


def pinned(network: MindSporeBackend | NativeBackend, name: str) -> int:
    assert network.adapters is not None
    slot = network.adapters.pin(name)
    assert slot is not None
    return slot


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(
            (family, {"fused": True})
            for family in (*FAMILIES, "qwen3", "mistral", *LLAMA_LIKE, *LAYER_NORM, *SPARSE, "glm")
        ),
        # Each compiles graphs: embeddings and heads with adapters and without, biases, parallel
        # sums, experts beside adapters. Of norms behind a sum adapters know nothing.
        *((family, {}) for family in ("bloom", "gpt_neox", "mixtral")),
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
    names = [None, *(adapter.name for adapter in adapters)]
    if family in LIKE_OTHERS and not way:
        forced = forced[:, :0]
    steps = forced.shape[1] + 1
    network = backend(model, weights, adapters, **way)
    known = way == {"use_past": False} or (family in LIKE_OTHERS and not way)
    without = network if known else backend(model, weights, **way)
    plain = run(without, prompts, forced, [None] * len(prompts))
    for name, wanted in zip(names, expected["logits"], strict=True):
        got = run(network, prompts, forced, [name] * len(prompts))
        assert relative_error(got, wanted[:, :steps]) <= TOLERANCE, name
        assert np.array_equal(got, plain) == (name is None)
    for mixed, wanted in zip(expected["mixed_adapters"], expected["mixed_logits"], strict=True):
        got = run(network, prompts, forced, [names[number] for number in mixed])
        assert relative_error(got, wanted[:, :steps]) <= TOLERANCE
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

    ends = () if can_untie_head(model) else (sites(model)[0].weight, "lm_head.weight")
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
    if can_untie_head(model) and model.tie_word_embeddings:
        model = replace(model, tie_word_embeddings=False)
        changed["lm_head.weight"] = changed[sites(model)[0].weight].copy()
    for name, pair in adapter.pairs.items():
        product = pair.b.float32().astype(np.float64) @ pair.a.float32() * pair.scale
        changed[name] = changed[name] + (product.T if places[name].transposed else product)
    alone: Weights = {name: values.astype(np.float32) for name, values in changed.items()}
    return model, alone


@pytest.mark.parametrize(("family", "fused"), FUSED_AND_COMPILED)
def test_a_mixed_batch_equals_each_adapter_merged_and_run_alone(
    family: str, fused: bool, relative_error: Error
) -> None:
    model, weights = base_of(family, compiled=not fused)
    parts = ((1, 1.0), (64, 0.5))
    adapters = [random_adapter(model, seed, *part) for seed, part in enumerate(parts)]
    assert len({frozenset(adapter.pairs) for adapter in adapters}) == 2
    random = np.random.default_rng(7)
    prompts = random.integers(0, model.vocab_size, (3, 5)).astype(np.int32)
    forced = random.integers(0, model.vocab_size, (3, 3)).astype(np.int32)
    if not fused:  # a step's graph takes adapters as a prompt's does, and peft's logits hold both
        forced = forced[:, :0]
    order = [adapters[1], None, adapters[0]]
    network = backend(model, weights, adapters, slots=3, fused=fused)
    got = run(network, prompts, forced, [one and one.name for one in order])
    for slot, adapter in enumerate(order):
        if adapter is not None:
            model_alone, merged_weights = merged(model, weights, adapter)
            alone = backend(model_alone, merged_weights, slots=1, fused=True)
            wanted = run(alone, prompts[slot : slot + 1], forced[slot : slot + 1], [None])
            assert relative_error(got[slot], wanted[0]) <= TOLERANCE, adapter.name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rows_bits_do_not_depend_on_its_neighbours(family: str) -> None:
    """Rows of one adapter go through the operators together."""
    model, weights = base_of(family)
    adapters = [random_adapter(model, seed, 7, 0.8) for seed in (1, 2)]
    network = backend(model, weights, adapters, slots=6, fused=True)
    tokens = np.random.default_rng(3).integers(0, model.vocab_size, (6, 5)).astype(np.int32)
    first, second = (pinned(network, adapter.name) for adapter in adapters)
    order = [first, first, first, first, second, first]
    rows = [Row(slot, tokens[slot], 0, adapter_slot) for slot, adapter_slot in enumerate(order)]
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
        logits.append(run(network, prompts, prompts[:, :2], ["random_2", None, "random_1"]))
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
        return run(network, prompts, prompts[:, :2], ["random_2", None, "random_1"])

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
    model, weights = base_of("llama", compiled=True)
    adapters = [random_adapter(model, 1, 3, 1.0), random_adapter(model, 2, 5, 1.0)]
    prompts, none = np.arange(15, dtype=np.int32).reshape(3, 5), np.empty((3, 0), np.int32)
    rounded, exact = (
        run(backend(model, weights, adapters, **way), prompts, none, ["random_2", None, "random_1"])
        for way in ({"dtype": "float16"}, {"fused": True})
    )
    assert 1e-6 < relative_error(rounded, exact) <= 2e-2


def test_a_prompt_of_one_token_and_one_in_chunks(relative_error: Error) -> None:
    model, weights = base_of("llama", compiled=True)
    adapters = [random_adapter(model, 5, 4, 1.0)]
    network = backend(model, weights, adapters)
    mine = pinned(network, "random_5")
    tokens = np.arange(3, 13, dtype=np.int32)
    whole = network.forward([Row(0, tokens, 0, mine)])
    network.forward([Row(1, tokens[:1], 0, mine)])
    assert relative_error(network.forward([Row(1, tokens[1:], 1, mine)]), whole) < 1e-5
    plain = backend(model, weights, fused=True).forward([Row(2, tokens[:1], 0)])
    assert relative_error(network.forward([Row(2, tokens[:1], 0)]), plain) < 1e-5


@pytest.mark.parametrize(
    ("family", "fused"), [*((family, True) for family in FAMILIES), ("llama", False)]
)
def test_an_adapter_that_comes_later_is_as_if_known_from_the_start(
    family: str, fused: bool
) -> None:
    """With adapters for all that may have one: for llama and qwen2 embedding and head, too."""
    model, weights = base_of(family, compiled=not fused)
    adapters = [random_adapter(model, seed, rank, 1.0) for seed, rank in ((1, 3), (2, 5))]
    names = ["random_1", None, "random_2"]
    prompts = np.arange(15, dtype=np.int32).reshape(3, 5)
    # A step takes the adapters from where the prompt does, by another graph to compile.
    forced = prompts[:, : 2 if fused else 0]
    lora = pool_size(adapters, 2)
    early = backend(model, weights, adapters, slots=3, lora=lora, fused=fused)
    wanted = run(early, prompts, forced, names)
    room = LoraSize(2, lora.rank, lora.targets)
    late = backend(model, weights, slots=3, lora=room, fused=fused)
    assert late.adapters is not None
    base = run(late, prompts, forced, [None] * 3)
    for adapter in adapters:
        late.adapters.add(adapter)
    assert run(late, prompts, forced, names).tobytes() == wanted.tobytes()
    assert base[1].tobytes() == wanted[1].tobytes()
    assert not np.allclose(base, wanted)
    late.adapters.add(replace(adapters[0], name="random_2"))  # in the place of the other
    twice = run(late, prompts[[0, 1, 0]], forced[[0, 1, 0]], names)
    np.testing.assert_allclose(twice[2], twice[0], rtol=0, atol=1e-4 * abs(twice[0]).max())


@pytest.mark.parametrize("fused", [False, True])
def test_adapters_come_and_go_while_another_is_in_use(fused: bool) -> None:
    model, weights = base_of("llama", compiled=not fused)
    mine, *others = (random_adapter(model, seed, 4, 1.0) for seed in range(4))
    lora = pool_size([mine, *others], 2)
    network = backend(model, weights, [mine], slots=2, lora=lora, fused=fused)
    slots = network.adapters
    assert slots is not None
    prompts = np.arange(10, dtype=np.int32).reshape(2, 5)
    forced = np.arange(50, 58, dtype=np.int32).reshape(1, 8)
    alone = run(network, prompts[:1], forced, [mine.name])[0]
    place = pinned(network, mine.name)
    found = [network.forward([Row(0, prompts[0], 0, place)])[0]]
    beside: list[bytes] = []
    for step, token in enumerate(forced[0]):
        other = others[step % 3]
        slots.add(other)
        assert slots.pin(other.name) == 1 - place
        rows = [Row(0, np.array([token]), 5 + step, place), Row(1, prompts[1], 0, 1 - place)]
        first, second = network.forward(rows)
        found.append(first)
        beside.append(second.tobytes())
        slots.unpin(other.name)
        if step % 2:
            slots.remove(other.name)
    assert np.stack(found).tobytes() == alone.tobytes()
    assert len(set(beside)) == 3 and beside[:3] == beside[3:6]


def test_adapters_that_do_not_fit_bfloat16_are_refused_beside_others(relative_error: Error) -> None:
    model, weights = base_of("llama", compiled=True)
    half, exact = random_adapter(model, 1, 2, 1.0, "BF16"), random_adapter(model, 2, 2, 1.0)
    network = backend(model, weights, [half], fused=True)
    assert network.adapters is not None
    with pytest.raises(ConfigError, match="got values that bfloat16 does not hold") as caught:
        network.adapters.add(exact)
    assert "adapter_dtype=bf16 rounds all adapters" in caught.value.hint
    cells = backend(model, weights, [half])
    rounding = backend(model, weights, [half], fused=True, rounded=True)
    prompts, none = np.arange(5, dtype=np.int32)[None], np.empty((1, 0), np.int32)
    late = []
    for other in (cells, rounding):
        assert other.adapters is not None
        other.adapters.remove(half.name)
        other.adapters.add(exact)
        late.append(run(other, prompts, none, [exact.name]))
    nearest = backend(model, weights, [nearest_bfloat16(exact)], fused=True, rounded=True)
    wanted = run(nearest, prompts, none, [exact.name])
    assert late[1].tobytes() == wanted.tobytes()
    plain = backend(model, weights, [exact], fused=True)
    assert relative_error(late[0], run(plain, prompts, none, [exact.name])) < 1e-5


def test_a_network_that_takes_no_adapters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, weights = base_of("llama")
    monkeypatch.setattr(
        decoder,
        "DecoderCell",
        lambda model, weights, options: DecoderCell(model, weights, replace(options, lora=None)),
    )
    with pytest.raises(ArtifactError, match="this network takes none for 16 of their 16 weights"):
        backend(model, weights, [random_adapter(model, 1, 2, 1.0)])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("family", "module"), [("qwen3_moe", "gate_proj"), ("mixtral", "w1")])
def test_adapters_of_experts_are_refused_by_name(
    family: str, module: str, fused: bool, tmp_path: Path
) -> None:
    model, weights = base_of(family)
    folder = tmp_path / "some"
    shutil.copytree(FIXTURES / "adapters" / family / "some", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": [module]}))
    tensors = {}
    for site in sites(model):
        if site.hugging_face.endswith(module):
            name = f"base_model.model.{site.hugging_face}"
            tensors[f"{name}.lora_A.weight"] = np.ones((3, site.width_in), np.float32)
            tensors[f"{name}.lora_B.weight"] = np.ones((site.width_out, 3), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    adapters = list(open_adapters(folder, model).values())
    with pytest.raises(ArtifactError, match=r"takes none for 10 of their 10 weights, .*ffn\.0\.w1"):
        backend(model, weights, adapters, fused=fused)
