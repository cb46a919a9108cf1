"""GGUF files of the tiny models of tests/fixtures/reference, as llama.cpp's converter writes them.

Names of tensors and blocks are the `gguf` package's, but for Q4_K, which it only reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Floats = NDArray[np.float32]
SAME = (
    "chatglm",
    "gemma2",
    "glm4",
    "granite",
    "llama",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
)
ARCHITECTURES = {name: name for name in SAME} | {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
    "glm": "chatglm",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
}
CHATGLM = {  # what its config.json calls what others have
    "padded_vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "seq_length": "max_position_embeddings",
    "ffn_hidden_size": "intermediate_size",
    "multi_query_group_num": "num_key_value_heads",
    "layernorm_epsilon": "rms_norm_eps",
    "kv_channels": "head_dim",
}
HALF_ROTATED = ("chatglm", "glm4")
PERMUTED = ("granite", "llama", "smollm3")  # rows of q and k
EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "down_proj": "down", "w2": "down"}
PROJECTIONS |= {"up_proj": "up", "w3": "up"}
KINDS = ("F32", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "MXFP4")


def write_model_gguf(
    path: Path,
    folder: Path,
    kind: str = "F32",
    metadata: dict[str, int] | None = None,
    *,
    apart: bool = False,
    mixed: Mapping[str, str] | None = None,
) -> dict[str, Floats]:
    """Write the model of a Hugging Face folder, its matrices in blocks of `kind`; those of
    projections in `mixed`, such as up_proj, in blocks of another.

    As in llama.cpp, rows that are no whole blocks of Q4_K become Q5_0, of the others F16; and no
    window is written. `metadata` goes under the architecture's name on top. `apart`: each expert
    has a tensor of its own, as in the first files of Mixtral. Returns what the
    tensors of the file mean, under the names and in the order of the folder.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {ours: config[theirs] for theirs, ours in CHATGLM.items() if theirs in config}
    architecture = ARCHITECTURES[config["model_type"]]
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if kv_heads is not None:
        writer.add_head_count_kv(kv_heads)
    rope = config.get("rope_parameters", config)
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("norm_epsilon", config.get("layer_norm_eps")))
    if architecture == "gptneox":
        rotated = rope["partial_rotary_factor"] * (config["hidden_size"] // heads)
        writer.add_rope_dimension_count(int(rotated))
        writer.add_parallel_residual(config["use_parallel_residual"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if architecture == "phi3":
        _add_positions_of_phi3(writer, config, rope)
    if architecture in HALF_ROTATED:
        writer.add_rope_dimension_count(config["head_dim"] // 2)
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if architecture.startswith("gemma"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    experts = config.get("num_local_experts", config.get("num_experts"))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture in PERMUTED:
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    for token, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (id := config.get(f"{token}_token_id")) is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
    for key, value in (metadata or {}).items():
        writer.add_uint32(f"{architecture}.{key}", value)

    kinds = gguf.GGMLQuantizationType
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"]
    )
    meant = {}
    together: dict[str, list[NDArray[np.uint8]]] = {}  # the experts of a layer
    for name, values in sorted(load_file(folder / "model.safetensors").items(), key=_in_order):
        if found_expert := EXPERT.fullmatch(name):
            used = kinds[_fitting(kind, values.shape)]
            blocks = _q4_k(values) if used is kinds.Q4_K else gguf.quants.quantize(values, used)
            meant[name] = gguf.quants.dequantize(blocks, used).reshape(values.shape)
            layer, expert, projection = found_expert.groups()
            stored = f"blk.{layer}.ffn_{PROJECTIONS[projection]}"
            if apart:
                writer.add_tensor(f"{stored}.{expert}.weight", blocks, raw_dtype=used)
                continue
            each = together.setdefault(stored, [])
            each.append(blocks)
            if len(each) == experts:
                writer.add_tensor(f"{stored}_exps.weight", np.stack(each), raw_dtype=used)
            continue
        short = name.removeprefix("transformer.") if architecture == "chatglm" else name
        stored = names.get_name(short, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        less_one = architecture.startswith("gemma") and name.endswith("norm.weight")
        values = values + np.float32(1) if less_one else values
        by_head = ".query_key_value." in name and architecture == "gptneox"
        values = _swapped(values, heads, 3) if by_head else values
        rotary = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2], 0)
        if architecture not in PERMUTED:
            rotary = 0
        ordered = _interleaved(values, rotary) if rotary else values
        used = kinds[_fitting((mixed or {}).get(name.split(".")[-2], kind), values.shape)]
        blocks = _q4_k(ordered) if used is kinds.Q4_K else gguf.quants.quantize(ordered, used)
        writer.add_tensor(stored, np.ascontiguousarray(blocks), raw_dtype=used)
        found = gguf.quants.dequantize(blocks, used).reshape(values.shape)
        meant[name] = _halves(found, rotary) if rotary else found
        meant[name] = meant[name] - np.float32(less_one)
        if by_head:
            meant[name] = _swapped(meant[name], 3, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def _add_positions_of_phi3(
    writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any]
) -> None:
    """The rotated part of a head; factors of LongRoPE as tensors, without a name of the kind."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(int(head_dim * partial))
    original = config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    if config["sliding_window"] is None:
        writer.add_sliding_window(0)
    scaling = config.get("rope_scaling") or rope
    if "long_factor" not in scaling:
        return
    usual = math.sqrt(1 + math.log(config["max_position_embeddings"] / original, original))
    writer.add_rope_scaling_attn_factors(scaling.get("attention_factor", usual))
    for length in ("long", "short"):
        factors = np.array(scaling[f"{length}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _in_order(item: tuple[str, Floats]) -> tuple[str, int]:
    """Names, with those of experts by their number."""
    found = EXPERT.fullmatch(item[0])
    return (item[0], 0) if found is None else (f"{found[1]}.{found[3]}", int(found[2]))


def _fitting(kind: str, shape: tuple[int, ...]) -> str:
    """The type of a tensor in a file of `kind`."""
    if kind == "F32" or len(shape) == 1:
        return "F32"
    if kind == "Q4_K" and shape[-1] % 256:
        kind = "Q5_0"
    return "F16" if shape[-1] % 32 else kind


def _interleaved(values: Floats, heads: int) -> Floats:
    """Rows of q or k with the two of each rotation side by side."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _swapped(values: Floats, first: int, second: int) -> Floats:
    """Rows in `first` groups of `second` as `second` groups of `first`."""
    groups = values.reshape(first, second, -1, *values.shape[1:])
    return np.ascontiguousarray(groups.swapaxes(0, 1)).reshape(values.shape)


def _halves(values: Floats, heads: int) -> Floats:
    """The inverse of `_interleaved`."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _q4_k(values: Floats) -> NDArray[np.uint8]:
    """Rows of whole blocks of 256 as bytes: of each 32 a scale and a minimum of 6 bits, and per
    block two float16 that these are multiples of."""
    groups = values.reshape(-1, 8, 32)
    lowest = np.minimum(groups.min(-1), 0)
    scales = (groups.max(-1).clip(0) - lowest) / 15
    units = np.stack([scales.max(-1), -lowest.min(-1)], -1).clip(1e-6) / 63
    units = units.astype(np.float16)
    scale_unit, low_unit = units.astype(np.float32).T[:, :, None]
    scale = np.rint(scales / scale_unit).clip(1, 63).astype(np.uint8)
    low = np.rint(-lowest / low_unit).clip(0, 63).astype(np.uint8)
    steps = (groups + (low * low_unit)[..., None]) / (scale * scale_unit)[..., None]
    four = np.rint(steps).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = [
        units.view(np.uint8),
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        low[:, :4] | low[:, 4:] >> 4 << 6,
        scale[:, 4:] & 15 | low[:, 4:] << 4,
        (four[:, :, 0] | four[:, :, 1] << 4).reshape(-1, 128),
    ]
    return np.concatenate(packed, axis=1).reshape(*values.shape[:-1], -1)
