"""Layouts of quantized weights of other tools, as a quantization_config describes them: GPTQ, AWQ,
compressed-tensors, FP8, bitsandbytes, MXFP4. See packed_matrices for the tensors of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.files import read_json_object

# quant_method of a quantization_config -> the name for messages.
_METHODS = {
    **{"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "mxfp4": "MXFP4", "exl2": "EXL2"},
    **{"fbgemm_fp8": "FP8", "hqq": "HQQ", "aqlm": "AQLM", "bitnet": "BitNet"},
}
MXFP4_BLOCKS = r"\.experts\.(gate_up|down)_proj_blocks"
# Suffix of a tensor's name -> the layout, the most specific first.
_ENDINGS = {
    r"\._(handler|layer)\.weight": "Golden Stick",
    r"\.g_idx": "GPTQ",
    r"\.qweight": "GPTQ or AWQ",
    r"\.weight_packed": "compressed-tensors",
    r"\.weight(\.absmax|\.quant_state\..+|\.quant_map|_format)|\.SCB": "bitsandbytes",
    MXFP4_BLOCKS: "MXFP4",
    r"\.weight_scale_inv": "FP8",
    r"\.weight_scale": "compressed-tensors",
}
# File that describes a layout -> its quant_method; "": in a section of the file.
_FILES = {"config.json": "", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_SECTIONS = ("quantization_config", "compression_config")
# Files in which Ascend's tools describe each tensor -> the tool's name.
_DESCRIPTIONS = {
    "quant_model_description*.json": "msModelSlim",
    "quantization_description.json": "Golden Stick",
}
ASCEND_TOOLS = frozenset(_DESCRIPTIONS.values())
# Their types of tensors that are read; scales of inputs, attention and KV caches are not.
_ASCEND = set(
    "FLOAT W16A16S W8A16 W4A16 W8A8 W8A8_DYNAMIC W8A8_MIX W4A8_DYNAMIC W4A4_DYNAMIC"
    " WFP8AFP8_DYNAMIC W8A8_MXFP8 W4A4_MXFP4 W4A8_MXFP C8 FAQuant".split()
)
FLOATS = ("F32", "F16", "BF16")

# Fields that are read, or describe calibration or another engine.
_KNOWN = {
    "gptq": "bits checkpoint_format desc_act dynamic format group_size is_marlin_format pack_dtype"
    " sym act_group_aware alpha backend batch_size block_name_to_quantize cache_block_outputs"
    " compute_dtype damp_auto_increment damp_percent dataset device disable_exllama exllama_config"
    " lm_head max_input_length meta method model_file_base_name model_name_or_path model_seqlen"
    " module_name_preceding_first_block modules_in_block_to_quantize modules_to_not_convert mse"
    " offload_to_disk offload_to_disk_path pad_token_id parallel_packing quantizer static_groups"
    " tokenizer true_sequential uri use_cuda_fp16 use_exllama version",
    "awq": "bits group_size q_group_size version w_bit zero_point backend do_fuse exllama_config"
    " fuse_max_seq_len modules_to_fuse modules_to_not_convert",
    "compressed-tensors": "config_groups format global_compression_ratio ignore kv_cache_scheme"
    " quantization_status run_compressed sparsity_config transform_config version",
    "fp8": "activation_scheme dequantize fmt ignored_layers kv_cache_scheme kv_cache_quant_method"
    " modules_to_not_convert scale_fmt weight_block_size activation_scale_ub",
    "bitsandbytes": "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight"
    " llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit _load_in_4bit"
    " _load_in_8bit"
    " bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant",
}
_KNOWN["mxfp4"] = "dequantize modules_to_not_convert"
_KNOWN["fbgemm_fp8"] = _KNOWN["fp8"]


@dataclass(frozen=True)
class PackedLayout:
    """The layout that a quantization_config describes; a field is None where nothing says it."""

    method: str
    name: str  # "GPTQ (4 bits, group 128)"
    bits: int | None = None
    group: int | None = None  # -1: the whole row
    subtracted: bool = False  # zero points are stored 1 smaller
    ordered: bool = True  # a group's inputs need not be adjacent
    symmetric: bool = True  # of compressed-tensors: no zero points
    block: tuple[int, int] = (128, 128)  # of FP8: rows and columns that share a scale
    paired: bool = False  # of msModelSlim: W4A16 by output has two codes per byte
    # Of Ascend's tools: name -> type of each tensor; {}: nothing describes them.
    types: Mapping[str, str] = field(default_factory=dict)


def described(raw: Mapping[str, Any]) -> str:
    """The layout that a quantization_config describes: "GPTQ (4 bits, group 128)"."""
    method = _method_of(raw) or "a layout without a name"
    name = _METHODS.get(method, ascii(method[:40])[1:-1])
    found = dict(raw)
    for one in _weights_of(raw):
        found |= one
    for count in (4, 8):  # of bitsandbytes
        if raw.get(f"load_in_{count}bit") is True:
            found["bits"] = count
    bits = next((found[key] for key in ("bits", "w_bit", "num_bits") if key in found), None)
    group = next((found[key] for key in ("group_size", "q_group_size") if key in found), None)
    sizes = [f"{bits} bits"] if _is_count(bits) else []
    sizes += [f"group {group}"] if _is_count(group) else []
    return f"{name} ({', '.join(sizes)})" if sizes else name


def _method_of(raw: Mapping[str, Any]) -> str:
    method = raw.get("quant_method")
    if method is None and any(str(key).startswith(("bnb_", "load_in_")) for key in raw):
        return "bitsandbytes"
    return "" if method is None else str(method)


def _weights_of(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The descriptions of weights in compressed-tensors' groups of modules."""
    groups = raw.get("config_groups")
    every = groups.values() if isinstance(groups, dict) else ()
    found = [one.get("weights") for one in every if isinstance(one, dict)]
    return [one for one in found if isinstance(one, dict)]


def check_described(raw: object, where: str) -> None:
    """Raise ArtifactError for the quantization_config of a config.json that cannot be read."""
    if not isinstance(raw, dict):
        got = ascii(raw)[:60]
        raise ArtifactError(
            f"{where}: quantization_config: got {got}, expected an object", "fetch the file again"
        )
    layout_of(raw, where)


def layout_of(raw: Mapping[str, Any], where: str) -> PackedLayout:
    """The layout that a quantization_config describes. Raises ArtifactError for one that is not
    read, and for fields that may mean another."""
    method, name = _method_of(raw), described(raw)
    if method not in _KNOWN:
        raise packed_weights_error(where, name)
    for key in sorted(map(str, raw.keys() - {*_KNOWN[method].split(), "quant_method"})):
        if raw[key]:
            why = f"{ascii(key[:60])[1:-1]} is not known, and may change the weights"
            raise _not_read(where, name, why)

    def refuse_unless(fits: bool, key: str) -> None:
        if not fits:
            raise _not_read(where, name, f"{key}: {ascii(raw.get(key))[:60]}")

    if method == "gptq":
        bits, group = raw.get("bits"), raw.get("group_size")
        stored = raw.get("checkpoint_format") or raw.get("format") or "gptq"
        refuse_unless(type(bits) is int and bits in (2, 3, 4, 8), "bits")
        refuse_unless(group == -1 or _is_count(group), "group_size")
        refuse_unless(stored in ("gptq", "gptq_v2"), "checkpoint_format")
        refuse_unless(not raw.get("is_marlin_format"), "is_marlin_format")
        refuse_unless(raw.get("pack_dtype") in (None, "int32"), "pack_dtype")
        dynamic = raw.get("dynamic") or {}
        skips = isinstance(dynamic, dict) and all(str(key).startswith("-:") for key in dynamic)
        refuse_unless(skips, "dynamic")
        ordered = raw.get("desc_act") is not False
        return PackedLayout(method, name, bits, group, stored == "gptq", ordered)
    if method == "awq":
        bits = raw.get("bits", raw.get("w_bit", 4))
        group = raw.get("group_size", raw.get("q_group_size", 128))
        refuse_unless(type(bits) is int and bits == 4, "bits")
        refuse_unless(group == -1 or _is_count(group), "group_size")
        refuse_unless(str(raw.get("version", "gemm")).lower() == "gemm", "version")
        return PackedLayout(method, name, bits, group)
    if method == "compressed-tensors":
        formats = ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"]
        formats += ["mxfp4-pack-quantized", "dense"]
        groups = raw.get("config_groups") or {}
        refuse_unless(isinstance(groups, dict), "config_groups")
        for one in (raw, *(one for one in groups.values() if isinstance(one, dict))):
            refuse_unless(one.get("format") in (None, "mixed-precision", *formats), "format")
        sparsity = raw.get("sparsity_config") or {}
        dense = isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
        refuse_unless(dense, "sparsity_config")
        refuse_unless(not raw.get("transform_config"), "transform_config")
        symmetric = all(one.get("symmetric", True) is True for one in _weights_of(raw))
        blocks = [one["block_structure"] for one in _weights_of(raw) if one.get("block_structure")]
        block = blocks[0] if blocks else [128, 128]
        refuse_unless(_is_block(block), "config_groups")
        return PackedLayout(method, name, symmetric=symmetric, block=tuple(block))
    if method in ("bitsandbytes", "mxfp4"):
        return PackedLayout(method, name)
    block = raw.get("weight_block_size") or [128, 128]
    refuse_unless(raw.get("fmt", "e4m3") == "e4m3", "fmt")
    refuse_unless(_is_block(block), "weight_block_size")
    return PackedLayout("fp8", name, block=tuple(block))


def layout_in(folder: Path) -> PackedLayout | None:
    """The layout that the files of a folder describe; None where none does."""
    for pattern, tool in _DESCRIPTIONS.items():
        for description in sorted(folder.glob(pattern)):
            return _layout_of_types(read_json_object(description), str(description), tool)
    for file, method in _FILES.items():
        try:
            raw = read_json_object(folder / file)
        except ArtifactError:  # absent, or refused by another reader
            continue
        if method:
            return layout_of({"quant_method": method} | raw, str(folder / file))
        for section in map(raw.get, _SECTIONS):
            if isinstance(section, dict):
                return layout_of(section, str(folder / file))
    return None


def _layout_of_types(raw: Mapping[str, Any], where: str, tool: str) -> PackedLayout:
    """The layout of tensors that a tool of Ascend's describes one by one. Raises ArtifactError for
    types that are not read, and rotations of inputs."""
    types = {key: one for key, one in raw.items() if "." in key and isinstance(one, str)}
    for key, one in types.items():
        if one not in _ASCEND and not key.endswith(".quant_type"):
            raise packed_weights_error(where, f"{tool} ({key}: {ascii(one[:40])[1:-1]})")
    metadata = raw.get("metadata") or {}
    if not isinstance(metadata, dict) or metadata.get("quarot"):
        raise _not_read(where, tool, "metadata.quarot: inputs are rotated")
    ranks = sorted(key for key, one in raw.items() if key.startswith("rank_") and one)
    if ranks:
        raise _not_read(where, tool, f"{ranks[0]}: weights of several ranks, compressed")
    kinds = sorted({one for one in types.values() if one.startswith("W")})
    name = f"{tool} ({', '.join(kinds)})"
    return PackedLayout(tool, name, paired=raw.get("version") is not None, types=types)


def layout_of_names(names: Iterable[str]) -> str:
    """The layout that tensors of these names have; "" for that of no known tool."""
    listed = list(names)
    for ending, layout in _ENDINGS.items():
        if any(re.search(f"(?:{ending})$", name) for name in listed):
            return layout
    return ""


def packed_weights_error(where: str, layout: str) -> ArtifactError:
    return ArtifactError(
        f"{where}: the weights are packed: {layout} is not read yet",
        "take the model's 16-bit checkpoint, which quant=a16w4 or quant=a16w8 makes as small, or a "
        "GGUF file of it",
    )


def _not_read(where: str, name: str, what: str) -> ArtifactError:
    return ArtifactError(
        f"{where}: {name} is not read with this setting: {what}", packed_weights_error("", "").hint
    )


def tensor_type_error(path: Path, name: str, dtype: str, names: Iterable[str]) -> ArtifactError:
    """The error for a tensor of a type that no weights have, among those of these names."""
    if layout := "FP8" if dtype.startswith("F8_") else layout_of_names(names):
        return packed_weights_error(str(path), layout)
    return ArtifactError(
        f"{path}: tensor {name} is {dtype}, expected one of {', '.join(FLOATS)}",
        "convert the checkpoint to float32, float16 or bfloat16",
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 20


def _is_block(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))
