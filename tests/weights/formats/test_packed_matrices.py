"""Quantized matrices of other tools: the floats that they mean, in whole models and damaged.

`tests/packed_folders.py` writes them from the published layouts, apart from the reader."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from lite_runner.app import main
from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import Quantization
from lite_runner.architectures.reference import forward
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.native.structs import Packed
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint, tensors_at
from lite_runner.weights.formats import model_config_from_hf
from lite_runner.weights.quantization.quantize import (
    block_types,
    describe_blocks,
    with_quantization,
)
from lite_runner.weights.read_ahead import QuantizedWeights, native_bytes
from lite_runner.weights.sharding.partition import pieces
from tests.backends.native.ranks import logits_of
from tests.each import each
from tests.packed_folders import (
    KEPT,
    LAYOUTS,
    MODEL,
    mxfp4,
    write_folder,
    write_quantized,
    write_tensors,
)
from tests.paths import REFERENCE

FILE = "model.safetensors"


def opened(folder: Path) -> dict[str, LazyTensor]:
    return with_quantization(open_checkpoint(folder, MODEL), MODEL, Quantization("a16"))


def packed(tensors: Mapping[str, LazyTensor]) -> list[Packed]:
    return list(pack(MODEL, QuantizedWeights(tensors, MODEL)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_floats_that_the_file_means(name: str, tmp_path: Path) -> None:
    floats = write_folder(tmp_path, name)
    tensors = opened(tmp_path)
    for tensor, meant in floats.items():
        np.testing.assert_array_equal(tensors[tensor].float32(), meant, tensor)
    layers = packed(tensors)
    backend = NativeBackend(MODEL, layers, NativeOptions(slots=1, length=32))
    tokens = np.random.default_rng(1).integers(0, MODEL.vocab_size, 12).astype(np.int32)
    logits = logits_of(backend, [tokens[:8]], tokens[8:][None])[0]
    expected = forward(MODEL, floats, tokens)[7:]
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_stay_as_small_as_in_the_file(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, name)
    tensors = opened(tmp_path)
    quantized = [one for one in tensors.values() if one.block_type]
    assert len(quantized) == 13 and all(one.integers for one in quantized)
    for one in quantized:
        assert one.integers is not None
        assert one.integers.read().nbytes == one.integers.scheme.nbytes(*one.shape)
    estimated = sum(native_bytes(one, dequantize=False).resident for one in tensors.values())
    structs = 768 * 6
    assert sum(layer.block.nbytes for layer in packed(tensors)) <= 1.03 * estimated + structs
    if name in ("gptq 2 bits", "gptq 3 bits"):
        assert "13 matrices of GPTQ" in describe_blocks(tensors.values())
        assert "widened to 4 bits, 0.0 MB" in describe_blocks(tensors.values())
    else:  # a scale in four bytes for each 32 columns of FP8; of 128 it is 1.03
        most = 1.06 if name == "fp8 blocks" else 1.05
        most = 1.06 if name == "modelslim W8A8_MXFP8" else most
        assert estimated <= most * file_of(tmp_path).stat().st_size


def test_fused_matrices_are_widened_where_they_differ(tmp_path: Path) -> None:
    write_folder(tmp_path, "awq")
    tensors = open_checkpoint(tmp_path, MODEL)
    key = "model.layers.0.attention.wk.weight"
    tensors[key] = LazyTensor(tensors[key].shape, "F32", tensors[key].read)
    held = with_quantization(tensors, MODEL, Quantization("a16"))
    assert [held[key.replace("wk", one)].integers for one in ("wq", "wk", "wv")] == [None] * 3
    assert "2 matrices of AWQ (4 bits, group 32) widened to float32, 0.0 MB" in describe_blocks(
        held.values()
    )
    packed(held)


@pytest.mark.parametrize("name", ["gptq 4 bits", "gptq v2, ordered", "fp8 blocks", "fp8 by tensor"])
def test_ranks_have_whole_groups_or_floats(name: str, tmp_path: Path) -> None:
    floats = write_folder(tmp_path, name)
    tensors = opened(tmp_path)
    shards = [
        pieces(tensors, MODEL, Ranks(rank, tensor=2), vocab_parallel=True) for rank in range(2)
    ]
    line = describe_blocks(shards[0].values())
    assert line.startswith(f"weights: {next(iter(block_types(tensors.values())))} as the file has")
    # Its inputs are those of both ranks.
    assert ("3 matrices of GPTQ (4 bits, group 32) widened to float32" in line) == (
        name == "gptq v2, ordered"
    )
    for tensor, meant in floats.items():
        axis = [i for i, n in enumerate(shards[0][tensor].shape) if n != meant.shape[i]]
        whole = [one[tensor].float32() for one in shards]
        joined = np.concatenate(whole, axis[0]) if axis else whole[0]
        np.testing.assert_array_equal(joined, meant, tensor)
        for one in shards:
            integers = one[tensor].integers
            if integers is not None and axis == [0]:
                np.testing.assert_array_equal(integers.read().float32(), one[tensor].float32())


FAMILIES = ("phi3", "glm4", "gpt_neox", "starcoder2", "gemma3", "mixtral", "qwen3_moe", "olmo2")


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *((case, "pack-quantized 4 bits, zero points") for case in FAMILIES),
        ("deepseek_v3", "fp8 blocks"),  # as published
        ("glm4_moe", "fp8 blocks"),
    ],
)
def test_matrices_of_every_family(case: str, layout: str, tmp_path: Path) -> None:
    """Fused, transposed and of experts, too."""
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    for folder in (quantized, plain):
        folder.mkdir()
    meant = write_quantized(quantized, REFERENCE / case, layout)
    shutil.copy(REFERENCE / case / "config.json", plain)
    save_file(meant, plain / FILE)
    model = model_config_of(quantized)
    assert model is not None and model == model_config_of(plain)
    expected = open_checkpoint(plain, model)
    found = with_quantization(open_checkpoint(quantized, model), model, Quantization("a16"))
    kept = 0
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].float32(), tensor.float32(), name)
        integers = found[name].integers
        if integers is not None:
            values = integers.read().float32()
            values = values if values.shape == tensor.shape else values.T
            np.testing.assert_array_equal(values, tensor.float32(), name)
            kept += 1
    assert kept >= 8 and len(list(pack(model, QuantizedWeights(found, model)))) > 3


def test_conv1d_is_held_as_other_linear_layers(tmp_path: Path) -> None:
    meant = write_quantized(tmp_path, REFERENCE / "gpt2", "int-quantized", conv1d=True)
    model = model_config_of(tmp_path)
    assert model is not None
    found = open_checkpoint(tmp_path, model)
    name = "backbone.blocks.0.attention.projection.weight"
    stored = next(one for one in meant if one.endswith("h.0.attn.c_proj.weight"))
    expected = meant[stored] if found[name].shape == meant[stored].shape else meant[stored].T
    np.testing.assert_array_equal(found[name].float32(), expected)
    assert sum(bool(one.block_type) for one in found.values()) >= 8


@each("name", LAYOUTS)
def test_other_shapes_and_types_end_in_an_error(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("layout")
    write_folder(tmp_path, name)
    described, data = header(tmp_path)
    draw = np.random.default_rng(len(name))
    names = [one for one in described if f"{Q}." in one and "bias" not in one]
    for _ in range(60):
        changed = json.loads(json.dumps(described))
        one = changed[names[draw.integers(len(names))]]
        if draw.integers(2):
            one["dtype"] = SAME_SIZE[one["dtype"]]
        else:
            shapes = [one["shape"][::-1], [int(np.prod(one["shape"]))], [*one["shape"], 1]]
            one["shape"] = next(s for s in shapes if s != one["shape"])
        text = json.dumps(changed).encode()
        new = tmp_path / "new"  # the one before may still be read, beside
        new.write_bytes(len(text).to_bytes(8, "little") + text + data)
        new.replace(file_of(tmp_path))
        with contextlib.suppress(ArtifactError):
            packed(opened(tmp_path))


SAME_SIZE = {"I32": "F32", "F32": "I32", "F16": "BF16", "BF16": "I16", "I64": "F64", "I8": "U8"}
SAME_SIZE |= {"U8": "I8", "F8_E4M3": "F8_E5M2"}


def test_quant_none_computes_with_floats(tmp_path: Path) -> None:
    write_folder(tmp_path, "gptq v2, ordered")
    tensors = with_quantization(open_checkpoint(tmp_path, MODEL), MODEL, Quantization())
    assert all(one.integers is None for one in tensors.values())


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def header(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = file_of(folder).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def stored(folder: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a folder, to be changed and written again."""
    types = {"I32": "<i4", "I64": "<i8", "I8": "i1", "U8": "u1", "F8_E4M3": "u1"}
    types |= {"F16": "<f2", "F32": "<f4", "BF16": "<u2"}
    described, data = header(folder)
    described.pop("__metadata__")
    return {
        name: np.frombuffer(data[slice(*one["data_offsets"])], types[one["dtype"]])
        .reshape(one["shape"])
        .copy()
        for name, one in described.items()
    }


Q = "model.layers.0.self_attn.q_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"
Change = Callable[[dict[str, NDArray[Any]]], Any]


def without(suffix: str) -> Change:
    return lambda tensors: tensors.pop(f"{Q}.{suffix}")


def changed(suffix: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Change:
    def apply(tensors: dict[str, NDArray[Any]]) -> None:
        tensors[f"{Q}.{suffix}"] = change(tensors[f"{Q}.{suffix}"])

    return apply


def with_state(**given: Any) -> Change:
    """Of bitsandbytes' 4 bits."""
    text = json.dumps({"quant_type": "nf4", "shape": [64, 64], "blocksize": 32} | given)
    return changed(STATE, lambda a: np.frombuffer(text.encode(), np.uint8))


@each(
    ("name", "change", "says"),
    [
        ("gptq 4 bits", without("scales"), "lacks scales"),
        ("gptq 4 bits", without("qzeros"), "lacks qzeros"),
        ("gptq 4 bits", without("qweight"), "lacks qweight"),
        ("gptq 4 bits", changed("scales", lambda a: a[:1]), "scales is [1, 64], expected [2, 64]"),
        ("gptq 4 bits", changed("qweight", lambda a: a[0]), "qweight is [64], expected a matrix"),
        ("gptq 4 bits", changed("qweight", lambda a: a[:0]), "expected a matrix"),
        ("gptq 3 bits", changed("qweight", lambda a: a[:5]), "not of 3 bits"),
        ("gptq 4 bits", changed("scales", lambda a: a * np.inf), "a scale that is not finite"),
        ("gptq 4 bits", changed("g_idx", lambda a: a[::-1]), "but desc_act is false"),
        ("gptq v2, ordered", changed("g_idx", lambda a: a + 1), "not have 32 inputs of each group"),
        ("gptq v2, ordered", changed("g_idx", lambda a: a - 2**31), "not have 32 inputs of each"),
        ("gptq v2, ordered", changed("g_idx", lambda a: a * 0), "not have 32 inputs of each group"),
        ("awq", without("qzeros"), "lacks qzeros"),
        ("awq", changed("scales", lambda a: a[:1]), "scales is [1, 64], expected [2, 64]"),
        ("pack-quantized 4 bits", without("weight_scale"), "lacks weight_scale"),
        ("pack-quantized 4 bits", without("weight_shape"), "lacks weight_shape"),
        (
            "pack-quantized 4 bits",
            changed("weight_shape", lambda a: a * 2**40),
            "weight_packed is [64, 8], weight_shape",
        ),
        ("pack-quantized 4 bits", changed("weight_shape", lambda a: -a), "weight_shape [-64, -64]"),
        (
            "pack-quantized 4 bits, zero points",
            without("weight_zero_point"),
            "lacks weight_zero_point",
        ),
        ("int-quantized", without("weight_scale"), "lacks weight_scale"),
        ("int-quantized", changed("weight_scale", lambda a: a[:7]), "weight_scale is [7, 1] for a"),
        ("mxfp4-pack-quantized", changed("weight_scale", lambda a: a | 255), "is not finite"),
        ("mxfp4-pack-quantized", changed("weight_scale", lambda a: a[1:]), "expected [64, 2]"),
        ("fp8 blocks", without("weight_scale_inv"), "lacks weight_scale"),
        ("fp8 blocks", changed("weight_scale_inv", lambda a: a[None]), "for a matrix [64, 64]"),
        ("fp8 by tensor", changed("weight", lambda a: a | 0x7F), "a weight that is not a number"),
        ("bitsandbytes 8 bits", changed("weight_format", np.ones_like), "not 0, which are"),
        ("bitsandbytes 8 bits", without("SCB"), "lacks weight_scale"),
        ("bitsandbytes 4 bits", without("weight.quant_map"), "lacks weight.quant_map"),
        ("bitsandbytes 4 bits", without("weight.absmax"), "lacks weight.absmax"),
        ("bitsandbytes 4 bits", without(STATE), f"lacks {STATE}"),
        ("bitsandbytes 4 bits", changed(STATE, lambda a: a[1:]), "is not a JSON object"),
        ("bitsandbytes 4 bits", with_state(shape=[64, 10**30]), "is not a JSON object"),
        ("bitsandbytes 4 bits", with_state(shape=[2**20, 2**10]), "weight is [2048, 1], expected"),
        ("bitsandbytes 4 bits", with_state(blocksize=0), "is not a JSON object"),
        ("bitsandbytes 4 bits", with_state(blocksize=48), "and blocksize in a row"),
        (
            "bitsandbytes 4 bits, nested",
            with_state(shape=[64, 64], blocksize=32, nested_blocksize=2**30),
            "weight.nested_absmax is [8], expected [1]",
        ),
        ("bitsandbytes 4 bits", changed("weight.absmax", lambda a: a * np.nan), "not finite"),
        ("bitsandbytes 4 bits", changed("weight.quant_map", lambda a: a * np.inf), "not finite"),
        ("modelslim W8A8_DYNAMIC", changed("weight_offset", lambda a: a[:7]), "is [7, 1]"),
        ("modelslim W8A8", changed("input_scale", lambda a: a[:0]), "input_scale is [0], expected"),
    ],
)
def test_half_a_layout_is_refused_by_name(
    name: str, change: Change, says: str, tmp_path: Path
) -> None:
    folder = Path(mkdtemp(dir=tmp_path))
    write_folder(folder, name)
    tensors = stored(folder)
    change(tensors)
    write_tensors(folder, tensors)
    with pytest.raises(ArtifactError, match="not a matrix of") as caught:
        packed(opened(folder))
    assert says in caught.value.message and Q in caught.value.message
    assert caught.value.hint


def test_different_orders_of_the_same_inputs_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "gptq v2, ordered")
    tensors = stored(tmp_path)
    tensors[f"{Q}.g_idx"] = np.roll(tensors[f"{Q}.g_idx"], 1)
    write_tensors(tmp_path, tensors)
    with pytest.raises(ArtifactError, match="in different orders"):
        packed(opened(tmp_path))
    assert main([f"model={tmp_path}", "dry_run=true", "quant=none", "predict_data=hi"]) == 0


def test_zero_points_that_a_subtraction_borrowed_from_are_carried_back(tmp_path: Path) -> None:
    """As GPTQModel writes them: 1 less in whole words, also where a zero point is 0."""
    write_folder(tmp_path, "gptq 4 bits")
    tensors = stored(tmp_path)
    name = f"{Q}.qzeros"
    zeros = np.random.default_rng(3).integers(0, 2**32, tensors[name].shape, dtype=np.uint32)
    zeros[:, 0] &= 0xFFFFF00F
    tensors[name] = (zeros - np.uint32(0x11111111)).view(np.int32)
    write_tensors(tmp_path, tensors)
    integers = open_checkpoint(tmp_path, MODEL)["model.layers.0.attention.wq.weight"].integers
    assert integers is not None
    found = integers.read().zeros
    assert found is not None
    expected = zeros[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    np.testing.assert_array_equal(found.T, expected.reshape(len(zeros), -1))


def test_modules_that_are_not_quantized_stay_floats(tmp_path: Path) -> None:
    write_folder(tmp_path, "fp8 blocks")
    tensors = opened(tmp_path)
    kept = tensors["model.layers.1.attention.wo.weight"]
    assert KEPT.endswith("1.self_attn.o_proj") and kept.dtype == "F16" and not kept.block_type


def test_a_scale_of_mxfp4_is_of_32_columns(tmp_path: Path) -> None:
    """Of many, where those of 33 would be fewer."""
    tensors, meant = mxfp4(8, 33 * 32, 0)
    save_file({f"{Q}.{name}": one for name, one in tensors.items()}, tmp_path / FILE)
    section, _ = LAYOUTS["mxfp4-pack-quantized"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    np.testing.assert_array_equal(tensors_at(tmp_path)[f"{Q}.weight"].float32(), meant)


EXPERTS = "model.layers.0.mlp.experts"


def experts_of_gpt_oss() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        f"{EXPERTS}.gate_up_proj_blocks": draw.integers(0, 256, (3, 8, 2, 16), np.uint8),
        f"{EXPERTS}.gate_up_proj_scales": draw.integers(119, 123, (3, 8, 2), np.uint8),
        f"{EXPERTS}.down_proj_blocks": draw.integers(0, 256, (3, 64, 1, 16), np.uint8),
        f"{EXPERTS}.down_proj_scales": draw.integers(119, 123, (3, 64, 1), np.uint8),
        f"{EXPERTS}.down_proj_bias": draw.standard_normal((3, 64)).astype(np.float32),
    }


@pytest.mark.parametrize("configured", [True, False])
def test_experts_of_gpt_oss(configured: bool, tmp_path: Path) -> None:
    """Two values in a byte, as transformers' convert_moe_packed_tensors has them."""
    tensors = experts_of_gpt_oss()
    save_file(tensors, tmp_path / FILE)
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = {"quantization_config": section} if configured else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = tensors_at(tmp_path)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([numbers, -numbers])
    for kind, names in {
        "gate_up_proj": ["gate_proj", "up_proj"],
        "down_proj": ["down_proj"],
    }.items():
        blocks = tensors[f"{EXPERTS}.{kind}_blocks"]
        values = numbers[np.stack([blocks & 15, blocks >> 4], -1)].reshape(*blocks.shape[:3], 32)
        scales = np.ldexp(np.float32(1), tensors[f"{EXPERTS}.{kind}_scales"].astype(int) - 127)
        meant = (values * scales[..., None]).reshape(*blocks.shape[:2], -1)
        for expert, (part, name) in itertools.product(range(3), enumerate(names)):
            one = found.pop(f"{EXPERTS}.{expert}.{name}.weight")
            np.testing.assert_array_equal(one.float32(), meant[expert, part :: len(names)])
            assert one.integers is not None and one.integers.scheme.bits == 4
    assert list(found) == [f"{EXPERTS}.down_proj_bias"]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"down_proj_scales": None}, "down_proj: not a matrix of MXFP4: lacks scales"),
        ({"down_proj_scales": np.zeros((3, 64, 2), np.uint8)}, "scales is [3, 64, 2], expected"),
        ({"down_proj_blocks": np.zeros((3, 64, 16), np.uint8)}, "blocks is [3, 64, 16], not"),
        ({"down_proj_scales": np.full((3, 64, 1), 255, np.uint8)}, "a scale that is not finite"),
    ],
)
def test_broken_experts_of_gpt_oss(
    broken: dict[str, np.ndarray | None], says: str, tmp_path: Path
) -> None:
    tensors: dict[str, Any] = experts_of_gpt_oss()
    tensors |= {f"{EXPERTS}.{name}": array for name, array in broken.items()}
    save_file({name: one for name, one in tensors.items() if one is not None}, tmp_path / FILE)
    with pytest.raises(ArtifactError, match=re.escape(says)):
        for tensor in tensors_at(tmp_path).values():
            tensor.float32()


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path, relative_error: Callable[..., float]) -> None:
    """All of a layer in two tensors; rows of gate and up alternate."""
    raw = json.loads((REFERENCE / "gpt_oss" / "config.json").read_text())
    raw |= {"intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = model_config_from_hf(raw, "config.json")
    draw, tensors, meant = np.random.default_rng(0), {}, {}
    for one in parameters(config):
        if one.fused is None:
            values = draw.normal(0, 0.3, one.shape).astype(np.float32)
            tensors[one.hugging_face] = meant[one.name] = values
        elif one.kind == "bias":
            name, (part, parts) = one.fused.name, (one.fused.part, one.fused.parts)
            whole = tensors.setdefault(name, np.zeros((4, parts * one.shape[0]), np.float32))
            values = draw.normal(0, 0.3, one.shape).astype(np.float32)
            whole[one.expert, part::parts] = meant[one.name] = values
        else:
            name, (part, parts) = one.fused.name, (one.fused.part, one.fused.parts)
            written, values = mxfp4(*one.shape, seed=len(meant))
            rows, groups = parts * one.shape[0], one.shape[1] // 32
            blocks = tensors.setdefault(f"{name}_blocks", np.zeros((4, rows, groups, 16), np.uint8))
            scales = tensors.setdefault(f"{name}_scales", np.zeros((4, rows, groups), np.uint8))
            blocks[one.expert, part::parts] = written["weight_packed"].reshape(-1, groups, 16)
            scales[one.expert, part::parts] = written["weight_scale"]
            meant[one.name] = values
    save_file(tensors, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path, config)
    for name, values in meant.items():
        np.testing.assert_array_equal(found[name].float32(), values, name)
    weights = QuantizedWeights(with_quantization(found, config, Quantization()), config)
    model = NativeBackend(config, pack(config, weights), NativeOptions(1, 40))
    prompt = draw.integers(0, 64, 30).astype(np.int32)
    logits = model.forward([Row(0, prompt, 0)])
    assert relative_error(logits[0], forward(config, meant, prompt)[-1]) <= 5e-4
    name = next(one for one in tensors if one.endswith("_scales"))
    save_file(tensors | {name: tensors[name][:, 1:].copy()}, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"scales is .*, expected"):
        open_checkpoint(tmp_path, config)
