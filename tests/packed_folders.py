"""Folders with quantized weights as GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes and
msModelSlim publish them, and the floats that they mean: written from the published layouts, one
code at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from lite_runner.architectures import llama_like, parameters
from lite_runner.architectures.spec import Decoder, Rotary
from lite_runner.weights.formats import hf_from_model_config
from lite_runner.weights.formats.safetensors_file import Entry, write_entries

Array = NDArray[Any]
MODEL = llama_like.decoder(
    architecture="qwen2",
    rotary=Rotary(),
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=160,
    seq_length=64,
    norm_eps=1e-5,
    qkv_bias=True,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=(2,),
    pad_token_id=None,
)
KEPT = "model.layers.1.self_attn.o_proj"  # a float among quantized matrices
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each place of a word
_TYPES = {"int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8", "float16": "F16"}
_TYPES |= {"float32": "F32", "uint16": "BF16", "void8": "U8"}


def words(codes: Array, bits: int) -> Array:
    """Rows of codes as rows of words, the first code in the lowest bits."""
    size = -(-codes.shape[1] * bits // 32)
    rows = [sum(int(code) << bits * i for i, code in enumerate(row)) for row in codes]
    listed = [row.to_bytes(4 * size, "little") for row in rows]
    return np.frombuffer(b"".join(listed), "<i4").reshape(-1, size)


def bfloat16(values: Array) -> tuple[Array, Array]:
    """The bits, and what they mean."""
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


class Drawn:
    """Random codes, scales and zero points of a matrix, and its floats."""

    def __init__(self, out: int, into: int, bits: int, group: int, seed: int, zeros: bool) -> None:
        draw = np.random.default_rng(seed)
        self.bits, groups = bits, -(-into // group)
        self.middle = 1 << bits - 1
        drawn = np.rint(draw.normal(self.middle, self.middle / 2.5, (out, into)))
        self.codes = np.clip(drawn, 0, (1 << bits) - 1).astype(np.int64)
        self.scales = (draw.uniform(0.5, 1.5, (out, groups)) * 0.2 / 2**bits).astype(np.float16)
        near = draw.integers(-1, 2 if bits > 2 else 1, (out, groups)) + self.middle
        self.zeros = near if zeros else np.full((out, groups), self.middle)
        self.index = np.arange(into) // group
        self.draw = draw

    def mean(self, scales: Array | None = None) -> Array:
        """The matrix [out, in]."""
        scales = (self.scales if scales is None else scales).astype(np.float32)
        less = (self.codes - self.zeros[:, self.index]).astype(np.float32)
        return less * scales[:, self.index]


Written = tuple[dict[str, Array], Array]


def gptq(
    out: int, into: int, seed: int, *, bits: int, group: int, v2: bool = False, order: bool = False
) -> Written:
    one = Drawn(out, into, bits, into if group == -1 else group, seed, zeros=True)
    if order:
        one.index = np.random.default_rng(into).permutation(one.index)
    tensors = {
        "qweight": np.ascontiguousarray(words(one.codes.T.copy().T, bits).T),
        "qzeros": words(one.zeros.T - (not v2), bits),
        "scales": np.ascontiguousarray(one.scales.T),
        "g_idx": one.index.astype(np.int32),
    }
    return tensors, one.mean()


def awq(out: int, into: int, seed: int, *, group: int) -> Written:
    one = Drawn(out, into, 4, group, seed, zeros=True)

    def interleaved(codes: Array) -> Array:
        return words(
            codes.T.reshape(codes.shape[1], -1, 8)[:, :, _AWQ].reshape(codes.shape[1], -1), 4
        )

    tensors = {
        "qweight": interleaved(one.codes),
        "qzeros": interleaved(one.zeros),
        "scales": np.ascontiguousarray(one.scales.T),
    }
    return tensors, one.mean()


def pack_quantized(
    out: int,
    into: int,
    seed: int,
    *,
    bits: int,
    group: int,
    zeros: bool = False,
    order: bool = False,
) -> Written:
    one = Drawn(out, into, bits, group or into, seed, zeros)
    if order:
        one.index = np.random.default_rng(into).permutation(one.index)
    stored, scales = bfloat16(one.scales)
    tensors = {
        "weight_packed": words(one.codes, bits),
        "weight_scale": stored,
        "weight_shape": np.array([out, into]),
    }
    if zeros:
        tensors["weight_zero_point"] = np.ascontiguousarray(words(one.zeros.T, bits).T)
    if order:
        tensors["weight_g_idx"] = one.index.astype(np.int32)
    return tensors, one.mean(scales)


def int_quantized(
    out: int, into: int, seed: int, *, group: int = 0, zeros: bool = False
) -> Written:
    one = Drawn(out, into, 8, group or into, seed, zeros)
    tensors = {
        "weight": (one.codes - 128).astype(np.int8),
        "weight_scale": one.scales,
        "input_scale": np.ones(1, np.float16),
    }
    if zeros:
        tensors["weight_zero_point"] = (one.zeros - 128).astype(np.int8)
    return tensors, one.mean()


def bytes_of_bitsandbytes(out: int, into: int, seed: int) -> Written:
    one = Drawn(out, into, 8, into, seed, zeros=False)
    absmax = one.draw.uniform(0.05, 0.2, out).astype(np.float32)
    tensors = {
        "weight": (one.codes - 128).astype(np.int8),
        "SCB": absmax,
        "weight_format": np.zeros((), np.uint8),
    }
    return tensors, (one.codes - 128).astype(np.float32) * (absmax / np.float32(127))[:, None]


NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]


def nf4(out: int, into: int, seed: int, *, nested: bool) -> Written:
    draw = np.random.default_rng(seed)
    codes, count = draw.integers(0, 16, (out, into)), out * into // 32
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "shape": [out, into]}
    pairs = codes.reshape(-1, 2)
    tensors = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).astype(np.uint8),
        "weight.quant_map": np.array(NF4, np.float32),
        "weight.absmax": draw.uniform(0.05, 0.2, count).astype(np.float32),
    }
    scales = tensors["weight.absmax"]
    if nested:
        places = draw.integers(0, 256, count).astype(np.uint8)
        entries = np.linspace(-1, 1, 256, dtype=np.float32)
        outer = draw.uniform(0.01, 0.05, -(-count // 16)).astype(np.float32)
        state |= {"nested_blocksize": 16, "nested_offset": 0.11}
        scales = entries[places] * outer.repeat(16)[:count] + np.float32(0.11)
        tensors["weight.absmax"], tensors["weight.nested_absmax"] = places, outer
        tensors["weight.nested_quant_map"] = entries
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = text
    return tensors, np.array(NF4, np.float32)[codes] * scales.reshape(out, -1).repeat(32, 1)


def mxfp4(out: int, into: int, seed: int) -> Written:
    draw = np.random.default_rng(seed)
    codes, exponents = draw.integers(0, 16, (out, into)), draw.integers(119, 123, (out, into // 32))
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    means = np.concatenate([sizes, -sizes])[codes]
    tensors = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        "weight_scale": exponents.astype(np.uint8),
    }
    return tensors, means * np.float32(2) ** (exponents - 127).repeat(32, 1).astype(np.float32)


def e4m3(code: int) -> float:
    """A float of 8 bits by its definition."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return -size if sign else size


E4M3 = np.array([e4m3(code) for code in range(256)], np.float32)


def float8(out: int, into: int, seed: int, *, scales: str) -> Written:
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, 0x60, (out, into)) | draw.integers(0, 2, (out, into)) << 7
    shape = {"tensor": (1, 1), "row": (out, 1), "block": (-(-out // 32), -(-into // 32))}[scales]
    stored = (draw.uniform(0.5, 1.5, shape) * 0.02).astype(np.float32)
    wide = np.repeat(np.repeat(stored, -(-out // shape[0]), 0), -(-into // shape[1]), 1)
    if scales == "block":
        wide = np.repeat(np.repeat(stored, 32, 0), 32, 1)
    name = "weight_scale_inv" if scales == "block" else "weight_scale"
    given = stored.reshape(()) if scales == "tensor" else stored
    tensors = {"weight": codes.astype(np.uint8), name: given}
    return tensors, E4M3[codes] * wide[:out, :into]


def modelslim(
    out: int,
    into: int,
    seed: int,
    *,
    bits: int = 8,
    group: int = 0,
    pairs: str = "",
    kind: str = "",
) -> Written:
    """`pairs`: two codes in a byte are of two "outputs", or two "inputs"."""
    one = Drawn(out, into, bits, group or into, seed, zeros=kind == "W8A16")
    scales = one.scales.astype(np.float32)
    signed = (one.codes - one.middle).astype(np.int8)
    tensors = {"weight": signed, "weight_scale": scales}
    tensors["weight_offset"] = (one.zeros - one.middle).astype(np.float32)
    if pairs:
        ahead, behind = (
            (signed[0::2], signed[1::2])
            if pairs == "outputs"
            else (signed[:, 0::2], signed[:, 1::2])
        )
        tensors["weight"] = (ahead & 15 | behind << 4).astype(np.int8)
    if kind == "W8A8":
        del tensors["weight_offset"], tensors["weight_scale"]
        tensors["input_scale"] = np.array([0.25], np.float32)
        tensors["input_offset"] = np.array([3], np.float32)
        deq = scales[:, 0] * np.float32(0.25)
        tensors["deq_scale"] = deq.view(np.int32).astype(np.int64)
        tensors["quant_bias"] = -(signed.astype(np.int32) * 3).sum(1).astype(np.int32)
    return tensors, one.mean(scales)


def modelslim_floats(out: int, into: int, seed: int, *, bits: int) -> Written:
    if bits == 4:
        tensors, meant = mxfp4(out, into, seed)
        codes = tensors["weight_packed"].view("V1")
    else:
        found, _ = float8(out, into, seed, scales="row")
        codes = found["weight"]
        tensors, _ = mxfp4(out, into, seed)
        exponents = tensors["weight_scale"].astype(np.int64) - 127
        meant = E4M3[codes] * (np.float32(2) ** exponents.repeat(32, 1)).astype(np.float32)
    return {"weight": codes, "weight_scale": tensors["weight_scale"]}, meant


def _section(method: str, **given: Any) -> dict[str, Any]:
    return {"quant_method": method, **given}


def _groups(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return _section(
        "compressed-tensors", format=format, config_groups={"group_0": group}, ignore=[KEPT]
    )


def _ascend(kind: str, version: str | None = "1.0.0") -> dict[str, Any]:
    return {"model_quant_type": kind} | ({"version": version} if version else {})


# Name -> the section of config.json, or of msModelSlim's description, and what writes a matrix.
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[int, int, int], Written]]] = {
    **{
        f"gptq {bits} bits": (
            _section("gptq", bits=bits, group_size=32, desc_act=False, sym=False),
            lambda *a, bits=bits: gptq(*a, bits=bits, group=32),
        )
        for bits in (2, 3, 4, 8)
    },
    "gptq v2, ordered": (
        _section("gptq", bits=4, group_size=32, desc_act=True, checkpoint_format="gptq_v2"),
        lambda *a: gptq(*a, bits=4, group=32, v2=True, order=True),
    ),
    "gptq 8 bits, ordered": (
        _section("gptq", bits=8, group_size=16, desc_act=True, checkpoint_format="gptq_v2"),
        lambda *a: gptq(*a, bits=8, group=16, v2=True, order=True),
    ),
    "gptq by row": (
        _section("gptq", bits=4, group_size=-1, desc_act=False),
        lambda *a: gptq(*a, bits=4, group=-1),
    ),
    "awq": (
        _section("awq", bits=4, group_size=32, zero_point=True, version="gemm"),
        lambda *a: awq(*a, group=32),
    ),
    "pack-quantized 4 bits": (
        _groups("pack-quantized", num_bits=4, group_size=32, symmetric=True),
        lambda *a: pack_quantized(*a, bits=4, group=32),
    ),
    "pack-quantized 4 bits by row": (
        _groups("pack-quantized", num_bits=4, strategy="channel", symmetric=True),
        lambda *a: pack_quantized(*a, bits=4, group=0),
    ),
    "pack-quantized 4 bits, zero points": (
        _groups("pack-quantized", num_bits=4, group_size=16, symmetric=False),
        lambda *a: pack_quantized(*a, bits=4, group=16, zeros=True),
    ),
    "pack-quantized 4 bits, ordered": (
        _groups("pack-quantized", num_bits=4, group_size=32, symmetric=True, actorder="group"),
        lambda *a: pack_quantized(*a, bits=4, group=32, order=True),
    ),
    "pack-quantized 8 bits": (
        _groups("pack-quantized", num_bits=8, group_size=32, symmetric=False),
        lambda *a: pack_quantized(*a, bits=8, group=32, zeros=True),
    ),
    "pack-quantized 8 bits by row": (
        _groups("pack-quantized", num_bits=8, strategy="channel", symmetric=True),
        lambda *a: pack_quantized(*a, bits=8, group=0),
    ),
    "mxfp4-pack-quantized": (
        _groups("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32, symmetric=True),
        lambda *a: mxfp4(*a),
    ),
    "int-quantized": (
        _groups("int-quantized", num_bits=8, strategy="channel", symmetric=True),
        lambda *a: int_quantized(*a),
    ),
    "int-quantized, zero points": (
        _groups("int-quantized", num_bits=8, strategy="group", symmetric=False),
        lambda *a: int_quantized(*a, group=32, zeros=True),
    ),
    "fp8 blocks": (
        _section("fp8", fmt="e4m3", weight_block_size=[32, 32], modules_to_not_convert=[KEPT]),
        lambda *a: float8(*a, scales="block"),
    ),
    "fp8 by tensor": (
        _section("fp8", activation_scheme="static"),
        lambda *a: float8(*a, scales="tensor"),
    ),
    "float-quantized": (
        _groups("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
        lambda *a: float8(*a, scales="row"),
    ),
    "bitsandbytes 8 bits": (
        {"load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0},
        lambda *a: bytes_of_bitsandbytes(*a),
    ),
    "bitsandbytes 4 bits": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
        lambda *a: nf4(*a, nested=False),
    ),
    "bitsandbytes 4 bits, nested": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        lambda *a: nf4(*a, nested=True),
    ),
    "modelslim W8A8": (_ascend("W8A8"), lambda *a: modelslim(*a, kind="W8A8")),
    "modelslim W8A8_DYNAMIC": (_ascend("W8A8_DYNAMIC"), lambda *a: modelslim(*a)),
    "modelslim W8A16": (_ascend("W8A16"), lambda *a: modelslim(*a, kind="W8A16", group=32)),
    "modelslim W4A16 by output": (
        _ascend("W4A16"),
        lambda *a: modelslim(*a, bits=4, pairs="inputs"),
    ),
    "modelslim W4A16": (
        _ascend("W4A16"),
        lambda *a: modelslim(*a, bits=4, group=32, pairs="outputs"),
    ),
    "modelslim W4A16, one a byte": (
        _ascend("W4A16", version=None),
        lambda *a: modelslim(*a, bits=4, group=32),
    ),
    "modelslim W4A8_DYNAMIC": (
        _ascend("W4A8_DYNAMIC"),
        lambda *a: modelslim(*a, bits=4, pairs="outputs"),
    ),
    "modelslim W8A8_MXFP8": (_ascend("W8A8_MXFP8"), lambda *a: modelslim_floats(*a, bits=8)),
    "modelslim W4A4_MXFP4": (_ascend("W4A4_MXFP4"), lambda *a: modelslim_floats(*a, bits=4)),
}


def write_folder(folder: Path, name: str, model: Decoder = MODEL) -> dict[str, Array]:
    """A checkpoint whose linear layers are quantized, but for one; its floats by canonical name."""
    section, write = LAYOUTS[name]
    draw = np.random.default_rng(7)
    stored: dict[str, Array] = {}
    floats: dict[str, Array] = {}
    for seed, one in enumerate(parameters(model)):
        module, _, kind = one.hugging_face.rpartition(".")
        if not one.is_linear or kind != "weight" or module == KEPT:
            values = draw.normal(0, 0.1, one.shape).astype(np.float16)
            values += np.float16(len(one.shape) == 1 and "norm" in module)
            stored[one.hugging_face], floats[one.name] = values, values.astype(np.float32)
            continue
        tensors, floats[one.name] = write(*one.shape, seed)
        stored |= {f"{module}.{suffix}": array for suffix, array in tensors.items()}
        if name.startswith("gptq 4"):  # as its tools do where a layer has no bias
            stored.setdefault(f"{module}.bias", np.zeros(one.shape[0], np.float16))
    raw = hf_from_model_config(model)
    if kind := section.get("model_quant_type"):
        write_tensors(folder, stored, "quant_model_weights.safetensors")
        modules = {name.rpartition(".")[0] for name, one in stored.items() if "scale" in name}
        types = {
            name: kind if name.rpartition(".")[0] in modules and name[-4:] != "bias" else "FLOAT"
            for name in stored
        }
        (folder / "quant_model_description.json").write_text(json.dumps(section | types))
    else:
        write_tensors(folder, stored)
        raw |= {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(raw))
    return floats


def write_quantized(
    folder: Path, source: Path, name: str, *, conv1d: bool = False
) -> dict[str, Array]:
    """The model of a folder with random linear layers in a layout; all floats by their names.
    `conv1d`: those of the folder are [in, out]."""
    section, write = LAYOUTS[name]
    stored: dict[str, Array] = {}
    floats = load_file(source / "model.safetensors")
    for seed, (tensor, values) in enumerate(floats.items()):
        module = tensor.removesuffix(".weight")
        kept = module.endswith(("head", "embed_out", "wte", "wpe"))
        if values.ndim != 2 or "embed" in module or kept:
            stored[tensor] = values
            continue
        tensors, meant = write(*(values.shape[::-1] if conv1d else values.shape), seed)
        floats[tensor] = meant.T if conv1d else meant
        stored |= {f"{module}.{suffix}": array for suffix, array in tensors.items()}
    write_tensors(folder, stored)
    raw = json.loads((source / "config.json").read_text()) | {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(raw))
    return floats


def write_tensors(folder: Path, stored: dict[str, Array], name: str = "model.safetensors") -> None:
    """A file; uint8 matrices are floats of 8 bits, columns are not."""
    entries = [
        Entry(
            tensor,
            "F8_E4M3"
            if tensor.endswith(".weight") and one.dtype == np.uint8 and one.shape[-1:] != (1,)
            else _TYPES[one.dtype.name],
            one.shape,
            lambda one=one: [one],
        )
        for tensor, one in stored.items()
    ]
    write_entries(folder / name, entries, {"format": "pt"})
