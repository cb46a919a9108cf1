"""Networks for Ascend, as far as a machine without one can tell.

MindSpore's own front end checks the shapes and types of the operators that they are made of. Their
arithmetic is checked with stand-ins (conftest.py) that follow the operators' documents: block
tables, places, masks and scales are then right if the documents are. Neither says anything of the
hardware.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train.mind_ir_pb2 import ModelProto
from numpy.typing import NDArray

from lite_runner.architectures.quantization import Quant, Quantization
from lite_runner.architectures.spec import Decoder, Experts, FeedForward
from lite_runner.backends import Row
from lite_runner.backends.mindspore import backend as mindspore_network
from lite_runner.backends.mindspore import graph_cache
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.backends.mindspore.device import set_device
from lite_runner.backends.native.backend import NativeBackend, NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.networks import ascend_layers, parts
from lite_runner.networks.ascend_layers import (
    GroupedMixture,
    LinearIntegers,
    QuantizedLinear,
    signed_nibbles,
)
from lite_runner.networks.decoder import Decode, DecoderCell, Prefill, network_of
from lite_runner.networks.layers import Attention, BuildOptions, CacheSize, MixtureBiases
from lite_runner.system import environment
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import model_config_of
from lite_runner.weights.layouts import expected_tensors, random_checkpoint
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.quantization.quantized import QuantizedTensor, quantize
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from tests.paths import FIXTURES
from tests.sizes import ModelConfig, resized

LAYERS = 2
Reference = Callable[[str], Any]
Error = Callable[[NDArray, NDArray], float]
FAMILIES = {
    family: ModelConfig(
        family=family,
        vocab_size=90,
        hidden_size=64,
        num_layers=LAYERS,
        num_heads=4,
        n_kv_heads=2 if family == "llama" else 4,
        head_dim=16,
        intermediate_size=128,
        seq_length=512,
        norm_eps=1e-5,
        tie_word_embeddings=family != "llama",
    )
    for family in ("bloom", "gpt2", "llama")
}


@pytest.fixture(scope="module", autouse=True)
def cpu() -> None:
    set_device("CPU", 0)


# The front end


def primitives(network: nn.Cell, kind: str, slots: int, folder: Path) -> Counter[str]:
    """The number of each operator in an exported step."""
    one = Tensor(np.zeros(1, np.int32))
    if kind == "prefill":
        step: nn.Cell = Prefill(network)
        inputs = [Tensor(shape=[1, None], dtype=ms.int32), one, one, one]
    else:
        step = Decode(network)
        each = Tensor(np.zeros(slots, np.int32))
        inputs = [Tensor(np.zeros((slots, 1), np.int32)), each, each]
    step.set_train(False)
    ms.export(step, *inputs, file_name=str(folder / kind), file_format="MINDIR")
    model = ModelProto()
    model.ParseFromString((folder / f"{kind}.mindir").read_bytes())
    nodes = [node for graph in (model.graph, *model.functions) for node in graph.node]
    return Counter(node.op_type.split(":")[2] for node in nodes if node.op_type.startswith("REF::"))


def quantized_as(config: Decoder, quants: Mapping[str, Quant]) -> dict[str, LazyTensor]:
    """Random weights, quantized by the last of `quants` whose key is part of their name."""
    tensors = random_checkpoint(config, 0)
    found = dict(tensors)
    for part, quant in quants.items():
        whole = with_quantization(tensors, config, Quantization.of(quant, None))
        found.update((name, one) for name, one in whole.items() if part in name)
    return found


def attention_of(family: str, kind: str) -> dict[str, int]:
    """The operators of one layer: each has a block of its own, built alike."""
    single = "PagedAttentionMask" if family == "bloom" else "PagedAttention"
    which = "FlashAttentionScore" if kind == "prefill" else single
    return {
        **dict.fromkeys(("PagedAttention", "PagedAttentionMask", "FlashAttentionScore"), 0),
        which: 1,
        "ReshapeAndCache": 1,
        "Softmax": 0,
        "BatchMatMul": 0,
        "ScatterUpdate": 0,
    }


def test_the_front_end_takes_the_graphs(tmp_path: Path) -> None:
    """In float16, those of integers hold all of these: below."""
    config = FAMILIES["llama"]  # of two blocks, which share a graph
    options = BuildOptions(CacheSize(3, 200), ms.bfloat16, fused=True)
    network = network_of(config, ReadAhead(random_checkpoint(config, 0)), options)
    for kind in ("prefill", "decode"):
        found = primitives(network, kind, 3, tmp_path)
        expected = {name: 2 * count for name, count in attention_of("llama", kind).items()}
        expected |= {"MatMul": 2 * 7 + 1, "RmsNorm": 2 * 2 + 1}
        assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("family", "quants", "products"),
    [  # beside the head, which is of floats
        ("llama", {"": "a16w8"}, {"WeightQuantBatchMatmul": 7, "QuantBatchMatmul": 0, "MatMul": 1}),
        (  # four of 4 bits and one of 8 bits by integers, and one of floats
            "bloom",
            {".attention.": "a16w4", ".mapping.": "a8w8"},
            {"WeightQuantBatchMatmul": 4, "QuantBatchMatmul": 1, "MatMul": 2},
        ),
    ],
    ids=["llama", "bloom"],
)
def test_the_front_end_takes_quantized_graphs(
    family: str, quants: dict[str, Quant], products: dict[str, int], tmp_path: Path
) -> None:
    config = resized(FAMILIES[family], num_layers=1)
    integer = "a8w8" in quants.values()
    options = BuildOptions(CacheSize(3, 200), ms.float16, fused=True, integer_input=integer)
    tensors = quantized_as(config, quants)
    weights = LinearIntegers(QuantizedWeights(tensors, config), config)
    network = DecoderCell(config, weights, options)
    for kind in ("prefill", "decode"):
        found = primitives(network, kind, 3, tmp_path)
        expected = attention_of(family, kind) | products
        expected["RmsNorm"] = 3 if family == "llama" else 0
        assert {name: found[name] for name in expected} == expected
        assert (found["DynamicQuantExt"] > 0) == integer


@pytest.mark.parametrize(
    ("fused", "dtype", "family", "head_dim"),
    [
        (False, ms.float16, "llama", 16),
        (True, ms.float32, "llama", 16),
        (True, ms.float16, "llama", 24),
        (True, ms.bfloat16, "bloom", 16),
    ],
)
def test_stock_layers_where_the_fused_ones_do_not_serve(
    fused: bool, dtype: ms.Type, family: str, head_dim: int
) -> None:
    options = BuildOptions(CacheSize(3, 200), dtype, fused=fused)
    config = resized(FAMILIES[family], head_dim=head_dim)
    assert parts.layers_for(options, config) is parts.STOCK


@pytest.mark.parametrize(
    ("windows", "layers"),
    [
        ((511, 511), parts.STOCK),
        ((None, 511), parts.STOCK),  # one layer is enough: all share the step's inputs
        ((None, 512), parts.FUSED),  # of the whole context
    ],
)
def test_no_window_by_fused_attention(
    windows: tuple[int | None, ...], layers: parts.Layers
) -> None:
    """A single token's operator takes a length alone, and would show it all of the row."""
    config = FAMILIES["llama"]
    blocks = tuple(
        replace(block, attention=replace(block.attention, window=window))
        for block, window in zip(config.blocks, windows, strict=True)
    )
    options = BuildOptions(CacheSize(3, 200), ms.float16, fused=True)
    assert parts.layers_for(options, replace(config, blocks=blocks)) is layers


# The arithmetic, with stand-ins


@pytest.fixture
def on_ascend(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend for Ascend runs on CPU, in any type and with the heads of the fixtures."""
    monkeypatch.setattr(mindspore_network, "set_device", lambda *_, **__: None)
    monkeypatch.setattr(environment, "ascend_soc", lambda: "Ascend910B3")
    monkeypatch.setenv("MS_DISABLE_INTERNAL_KERNELS_LIST", "FlashAttentionScore")  # as we set it
    monkeypatch.setattr(parts, "supports", lambda *_: True)
    monkeypatch.setattr(ascend_layers, "BLOCK", 16)  # several blocks a slot, the last not full
    monkeypatch.setattr(graph_cache, "_claimed", True)  # a stand-in is nothing to keep


@pytest.mark.usefixtures("on_ascend")
@pytest.mark.parametrize("case", ["bloom_6_heads", "qwen3"])
def test_logits_equal_transformers(case: str, reference: Reference, relative_error: Error) -> None:
    known = reference(case)
    model = known.online(len(known.prompts), known.length, device="Ascend")
    assert isinstance(model._network.blocks[0].attention, ascend_layers.FusedAttention)
    assert relative_error(known.run(model), known.logits) <= 1e-4


@pytest.mark.usefixtures("on_ascend")
def test_a_mixtures_logits_equal_transformers(
    reference: Reference, relative_error: Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "TYPES", (ms.float32,))
    # Mixtral has a window, and so the stock attention.
    monkeypatch.setattr(parts, "supports", lambda _, model: set(model.windows) == {None})
    known = reference("mixtral")
    model = known.online(len(known.prompts), known.length, device="Ascend")
    mixtures = [block.experts for block in model._network.blocks if block.experts is not None]
    assert mixtures and all(isinstance(one, GroupedMixture) for one in mixtures)
    assert relative_error(known.prefill(model), known.logits[:, 0]) <= 1e-4


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("renormalized", [True, False])
def test_a_grouped_mixture_is_the_sum_of_its_chosen_experts(
    renormalized: bool, relative_error: Error
) -> None:
    """With an expert that nobody chose, and one that all did."""
    count, chosen, hidden, width, tokens = 6, 2, 16, 24, 5
    rng = np.random.default_rng(7)
    gates, ups = rng.standard_normal((2, count, width, hidden)).astype(np.float32) / 4
    downs = rng.standard_normal((count, hidden, width)).astype(np.float32) / 4
    router = rng.standard_normal((count, hidden)).astype(np.float32)
    x = np.abs(rng.standard_normal((tokens, hidden))).astype(np.float32)
    router[3], router[4] = -9, 9
    given = FeedForward(width, True, False, experts=Experts(count, chosen, renormalized))
    options = BuildOptions(None, ms.float32, fused=True)
    layer = GroupedMixture(options, given, router, gates, ups, downs, None, MixtureBiases())
    scores = x @ router.T
    factors = np.exp(scores - scores.max(-1, keepdims=True))
    factors /= factors.sum(-1, keepdims=True)
    wanted = np.zeros_like(x)
    for row, each in enumerate(factors):
        best = np.argsort(-each)[:chosen]
        assert 3 not in best and 4 in best
        for expert in best:
            gate = gates[expert] @ x[row]
            inner = gate / (1 + np.exp(-gate)) * (ups[expert] @ x[row])
            share = each[best].sum() if renormalized else 1
            wanted[row] += each[expert] / share * (downs[expert] @ inner)
    assert relative_error(layer(Tensor(x)).asnumpy(), wanted) <= 1e-5


def test_the_front_end_takes_a_grouped_mixture(tmp_path: Path) -> None:
    reference = FIXTURES / "reference" / "qwen3_moe"
    config = model_config_of(reference)
    assert config is not None
    config = replace(config, blocks=config.blocks[:1])
    options = BuildOptions(CacheSize(3, 48), ms.float16, fused=True)
    network = DecoderCell(config, ReadAhead(random_checkpoint(config, 0)), options)
    for kind in ("prefill", "decode"):
        found = primitives(network, kind, 3, tmp_path)
        assert found["GroupedMatmulV4"] == 3
        assert found["MoeInitRoutingV2"] == found["InnerMoeTokenUnpermute"] == 1


def test_a_windows_logits_equal_transformers(
    reference: Reference, relative_error: Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor that has the fused operators, in a type that they take."""
    monkeypatch.setattr(mindspore_network, "set_device", lambda *_, **__: None)
    monkeypatch.setattr(environment, "ascend_soc", lambda: "Ascend910B3")
    monkeypatch.setenv("MS_DISABLE_INTERNAL_KERNELS_LIST", "FlashAttentionScore")  # as we set it
    known = reference("mistral")
    model = known.online(len(known.prompts), known.length, device="Ascend", dtype="float16")
    assert isinstance(model._network.blocks[0].attention, Attention)
    assert relative_error(known.prefill(model), known.logits[:, 0]) <= 1e-2


@pytest.mark.parametrize(("soc", "pynative"), [("Ascend910A", False), ("Ascend910B3", True)])
def test_plain_operators_on_atlas_800_and_in_pynative_mode(
    soc: str,
    pynative: bool,
    reference: Reference,
    relative_error: Error,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PagedAttention reads its lengths from the input of a graph."""
    monkeypatch.setattr(mindspore_network, "set_device", lambda *_, **__: None)
    monkeypatch.setattr(environment, "ascend_soc", lambda: soc)
    known = reference("llama")
    given = {"device": "Ascend", "dtype": "float16", "pynative": pynative}
    model = known.online(len(known.prompts), known.length, **given)
    assert isinstance(model._network.blocks[0].attention, Attention)
    assert relative_error(known.prefill(model), known.logits[:, 0]) <= 1e-2


@pytest.mark.usefixtures("on_ascend")
def test_without_a_cache(reference: Reference, relative_error: Error) -> None:
    known = reference("bloom")
    model = known.online(len(known.prompts), 64, device="Ascend", use_past=False)
    assert relative_error(known.run(model), known.logits) <= 1e-4


@pytest.mark.usefixtures("on_ascend")
def test_float16_is_close(reference: Reference, relative_error: Error) -> None:
    known = reference("bloom_6_heads")
    model = known.online(len(known.prompts), 64, device="Ascend", dtype="float16")
    error = relative_error(known.prefill(model), known.logits[:, 0])
    assert 1e-6 < error <= 1e-2  # rounded to 11 bits, and really so


@pytest.mark.usefixtures("on_ascend")
def test_slots_own_their_blocks(reference: Reference, relative_error: Error) -> None:
    """Chunks, slots that sit a step out, and copies, against whole prompts in a slot of theirs."""
    tokens = np.random.default_rng(5).integers(0, 90, 80).astype(np.int32)
    known = reference("llama")
    config = replace(known.config, blocks=known.config.blocks[:1])
    tensors = known.tensors()
    weights = ReadAhead({name: tensors[name] for name in expected_tensors(config)})
    model = MindSporeBackend(
        config, weights, MindSporeOptions(slots=4, length=100, device="Ascend")
    )

    def same(rows: Sequence[Row], texts: Sequence[NDArray[np.int32]]) -> None:
        got = model.forward(rows)
        for logits, text in zip(got, texts, strict=True):
            assert relative_error(logits, model.forward([Row(3, text, 0)])[0]) < 1e-5

    first, second, third = tokens[:20], tokens[30:70], tokens[5:50]
    model.forward([Row(0, first, 0), Row(1, second, 0), Row(2, third[:15], 0)])
    same([Row(2, third[15:], 15)], [third])
    second = np.append(second, tokens[2])
    same([Row(1, second[-1:], 40)], [second])
    third, first = np.append(third, tokens[9]), np.append(first, tokens[7])
    same([Row(2, third[-1:], 45), Row(0, first[-1:], 20)], [third, first])
    model.copy([1, 0], [0, 2])  # all are read before any is written
    second, first = np.append(second, tokens[5]), np.append(first, tokens[6])
    same([Row(0, second[-1:], 41), Row(2, first[-1:], 21)], [second, first])


@pytest.mark.usefixtures("on_ascend")
@pytest.mark.parametrize(
    ("family", "quants", "bound"),
    # a8w8 rounds the activations, which the floats that it is compared with do not know.
    [("bloom", {"": "a16w8", ".attention.": "a16w4"}, 1e-5), ("gpt2", {"": "a8w8"}, 3e-2)],
    ids=["bloom", "gpt2"],
)
def test_integers_score_as_their_floats_do(
    family: str, quants: dict[str, Quant], bound: float, scores: Callable[..., NDArray[np.float64]]
) -> None:
    config = resized(FAMILIES[family], num_layers=1)
    tensors, rounded = quantized_as(config, quants), "a8w8" in quants.values()
    prompt = np.random.default_rng(1).integers(0, 90, 19).astype(np.int32)
    read = {name: LazyTensor(one.shape, "F32", one.float32) for name, one in tensors.items()}
    layers = pack(config, QuantizedWeights(read, config))
    floats = NativeBackend(config, layers, NativeOptions(slots=1, length=40))
    options = MindSporeOptions(slots=1, length=40, device="Ascend", integer_input=rounded)
    model = MindSporeBackend(config, QuantizedWeights(tensors, config), options)
    wanted = scores(floats, prompt)
    assert wanted.std() > 0.1
    error = float(np.abs(scores(model, prompt) - wanted).max())
    assert error <= bound
    assert not rounded or error > 1e-4


def weight_of(rows: int, columns: int, bits: int, group: int) -> QuantizedTensor:
    values = np.random.default_rng(3).standard_normal((rows, columns)).astype(np.float32) / 10
    values[0] = 0.25  # no range, and so no scale with 4 bits
    values[1] += 3  # a minimum far from zero
    return quantize(values, bits, group)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    [
        (8, 0, ms.float16),
        (8, 32, ms.float32),
        (8, 96, ms.float32),
        (4, 32, ms.float16),
        (4, 32, ms.float32),
        (4, 96, ms.float32),
    ],
)
def test_a_linear_layer_of_integers(
    bits: int, group: int, dtype: ms.Type, relative_error: Error
) -> None:
    weight = weight_of(10, 96, bits, group)
    bias = np.arange(10, dtype=np.float32)
    layer = QuantizedLinear(BuildOptions(None, dtype, fused=True), weight, bias)
    x = np.random.default_rng(4).standard_normal((5, 96)).astype(np.float32)
    wanted = x @ weight.float32().T + bias
    assert layer.widths == (96, 10)
    got = layer(Tensor(x)).asnumpy()
    assert got.dtype == np.float32
    assert relative_error(got, wanted) <= (1e-5 if dtype == ms.float32 else 3e-3)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("group", [0, 32])
def test_a_linear_layer_of_integers_by_integers(group: int, relative_error: Error) -> None:
    weight = weight_of(10, 96, 8, group)
    options = BuildOptions(None, ms.float32, fused=True, integer_input=True)
    x = np.random.default_rng(4).standard_normal((5, 96)).astype(np.float32)
    scales = np.abs(x).max(1, keepdims=True) / 127
    by_row = quantize(weight.float32(), 8, 0)
    product = np.rint(x / scales).astype(np.int64) @ by_row.values.T.astype(np.int64)
    wanted = product * scales * by_row.scales
    assert relative_error(QuantizedLinear(options, weight)(Tensor(x)).asnumpy(), wanted) <= 1e-5


def test_signed_nibbles_stand_for_the_same_values() -> None:
    """In float32 to the last bits; as float16, to what that holds of the minimum."""
    weight = weight_of(6, 64, 4, 32)
    pairs, scales, offsets = signed_nibbles(weight)
    assert pairs.shape == (64, 3) and pairs.dtype == np.int8
    assert scales.shape == offsets.shape == (2, 6)
    low, high = (pairs << 4).astype(np.int8) >> 4, pairs >> 4
    q = np.stack([low, high], -1).reshape(2, 32, 6).astype(np.float32)
    assert q.min() >= -8 and q.max() <= 7
    expected = weight.float32().T.reshape(2, 32, 6)
    assert np.abs((q + offsets[:, None]) * scales[:, None] - expected).max() < 1e-6
    rounded = [one.astype(np.float16).astype(np.float32)[:, None] for one in (scales, offsets)]
    assert np.abs((q + rounded[1]) * rounded[0] - expected).max() < 2e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_without_integers_are_those_of_the_checkpoint(family: str) -> None:
    """As a rank has them, whose pieces are floats."""
    config = resized(FAMILIES[family], num_layers=1)
    tensors = random_checkpoint(config, 0)
    weights = LinearIntegers(QuantizedWeights(tensors, config), config)
    for name, tensor in tensors.items():
        assert np.array_equal(weights(name), tensor.float32())
