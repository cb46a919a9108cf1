"""GGUF files of the tiny models of tests/fixtures/reference that need more than renamed tensors, in
float32, as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from lite_runner.weights.formats import model_config_from_hf
from lite_runner.weights.formats.hugging_face import shapes_in_files

Floats = NDArray[np.float32]
ARCHITECTURES = {
    "baichuan": "BAICHUAN",
    "bloom": "BLOOM",
    "cohere": "COMMAND_R",
    "cohere2": "COHERE2",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2",
    "ernie4_5": "ERNIE4_5",
    "exaone4": "EXAONE4",
    "falcon": "FALCON",
    "gemma": "GEMMA",
    "gemma4_text": "GEMMA4",
    "glm4_moe": "GLM4_MOE",
    "gpt2": "GPT2",
    "gpt_oss": "GPT_OSS",
    "granitemoe": "GRANITE_MOE",
    "granitemoehybrid": "GRANITE_HYBRID",
    "hunyuan_v1_dense": "HUNYUAN_DENSE",
    "hunyuan_v1_moe": "HUNYUAN_MOE",
    "internlm2": "INTERNLM2",
    "llama4_text": "LLAMA4",
    "minicpm": "MINICPM",
    "mpt": "MPT",
    "nemotron": "NEMOTRON",
    "nemotron_h": "NEMOTRON_H",
    "olmo3": "OLMO2",
    "olmoe": "OLMOE",
    "phi": "PHI2",
    "qwen": "QWEN",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_5_moe_text": "QWEN35MOE",
    "qwen3_5_text": "QWEN35",
    "qwen3_next": "QWEN3NEXT",
    "seed_oss": "SEED_OSS",
    "stablelm": "STABLELM",
}
PERMUTED = ("baichuan", "granitemoe", "granitemoehybrid", "internlm2", "minicpm")  # rows of q and k
MAMBA = ("granitemoehybrid", "nemotron_h")
LESS_ONE = (
    "gemma",
    "nemotron",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)  # norms whose files have weights less 1
# What config.json of earlier families calls the usual fields.
EARLIER = {
    **{"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
    **{"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
    **{"max_seq_len": "max_position_embeddings", "n_positions": "max_position_embeddings"},
    **{"seq_length": "max_position_embeddings", "model_max_length": "max_position_embeddings"},
}
# config.json -> method of the writer, of any family that has the field.
NUMBERS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "ffn_hidden_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "layer_norm_eps": "layer_norm_eps",
    "layer_norm_epsilon": "layer_norm_eps",
    "norm_eps": "layer_norm_eps",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_topk": "expert_used_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "n_shared_experts": "expert_shared_count",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "logit_scale": "logit_scale",
    "use_parallel_residual": "parallel_residual",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "scale_emb": "embedding_scale",
    "linear_num_value_heads": "ssm_time_step_rank",
    "linear_num_key_heads": "ssm_group_count",
    "linear_key_head_dim": "ssm_state_size",
    "linear_conv_kernel_dim": "ssm_conv_kernel",
    "mamba_num_heads": "ssm_time_step_rank",
    "n_groups": "ssm_group_count",
    "ssm_state_size": "ssm_state_size",
    "conv_kernel": "ssm_conv_kernel",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "mamba_n_heads": "ssm_time_step_rank",
    "mamba_n_groups": "ssm_group_count",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "ssm_conv_kernel",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}

FAMILY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
FAMILY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
FAMILY |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5}
BAICHUAN = {"num_key_value_heads": 4, "tie_word_embeddings": False}
WITHOUT_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "internlm2": FAMILY | {"bias": False, "tie_word_embeddings": False},
    "qwen": {name: FAMILY[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "kv_channels": 8, "seq_length": 64}
    | {"rotary_emb_base": 500.0, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False},
    # llama.cpp knows the two of them by their layers.
    "baichuan": FAMILY | BAICHUAN | {"num_hidden_layers": 32},
    "baichuan alibi": FAMILY
    | BAICHUAN
    | {"num_hidden_layers": 40, "max_position_embeddings": None, "model_max_length": 64},
    # A residual scale that float32 has exactly.
    "minicpm": FAMILY | {"scale_emb": 12, "dim_model_base": 8, "scale_depth": 1.5 * 2**0.5},
}


def write_random_folder(folder: Path, kind: str) -> None:
    """A tiny model of WITHOUT_TRANSFORMERS as a Hugging Face folder."""
    raw = WITHOUT_TRANSFORMERS[kind] | {"model_type": kind.split()[0]}
    model, rng = model_config_from_hf(raw, "config.json", notes=False), np.random.default_rng(1)
    shapes = shapes_in_files(model).items()
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def write_newer_gguf(
    path: Path, folder: Path, *, further: bool = False, apart: bool = True
) -> None:
    """Write the model of a Hugging Face folder; `further`: with a layer for multi-token
    prediction; `apart`: latent attention as newer converters write it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {usual: config[name] for name, usual in EARLIER.items() if name in config}
    kind, kinds = config["model_type"], config.get("layers_block_type", ())
    layers = config.setdefault("num_hidden_layers", len(kinds))
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[kind] + "_MOE" * ("moe" in kinds)]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(layers + further)
    _add_metadata(writer, config)
    tensors = load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(architecture, layers + further)
    if kind.startswith("deepseek"):
        _add_latent(writer, config, tensors, apart=apart)
    for name, values in _converted(config, tensors):
        # Command-R's head is never its own there.
        other = {"lm_head.weight": "output.weight"}.get(name, name if name[:4] == "blk." else None)
        name = name.removeprefix("transformer.") if kind == "bloom" else name
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or other
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(values))
    if further:
        writer.add_nextn_predict_layers(1)
    if further and f"model.layers.{layers}.eh_proj.weight" not in tensors:
        for name in ("attn_norm", "nextn.enorm"):
            writer.add_tensor(f"blk.{layers}.{name}.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kind, hidden, heads = (
        config[name] for name in ("model_type", "hidden_size", "num_attention_heads")
    )
    if kind == "llama4_text":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        config = config | {"intermediate_size": config["intermediate_size_mlp"]}
    if kind == "nemotron_h":
        kinds = config["layers_block_type"]
        config["rms_norm_eps"] = config["layer_norm_epsilon"]  # files have both
        writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
        if "moe" in kinds:
            config["intermediate_size"] = config["moe_intermediate_size"]
        for field, layers in (
            ("num_key_value_heads", ("full_attention",)),
            ("intermediate_size", ("mlp", "moe")),
        ):
            config[field] = [config[field] if one in layers else 0 for one in kinds]
        if "moe" in kinds:
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_norm(config["norm_topk_prob"])
    if kind == "gemma4_text":
        config = _of_gemma4(writer, config)
    for field, method in NUMBERS.items():
        if kind == "nemotron_h" and "expert" in method and "moe" not in kinds:
            continue
        if config.get(field) is not None:
            getattr(writer, f"add_{method}")(config[field])
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    rope = config.get("rope_parameters", config)
    if kind == "olmo3":
        rope = rope["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("bloom", "gpt2", "mpt"):
        writer.add_feed_forward_length(config.get("n_inner") or 4 * hidden)
    elif kind != "falcon":
        writer.add_rope_freq_base(rope.get("rope_theta", rope.get("rotary_emb_base", 10000.0)))
    if kind == "bloom":
        writer.add_context_length(2048)
    if kind == "mpt":
        writer.add_max_alibi_bias(8.0)
    if kind == "qwen":
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
        writer.add_rope_dimension_count(config["kv_channels"])
    if kind == "baichuan":
        writer.add_rope_dimension_count(hidden // heads)
    head_dim = config.get("head_dim") or hidden // heads
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if (share := rope.get("partial_rotary_factor")) is not None:
        writer.add_rope_dimension_count(int(share * head_dim))
    if slides := config.get("sliding_window"):
        writer.add_sliding_window(slides)
    if kind in ("exaone4", "olmo3") and slides:
        writer.add_sliding_window_pattern(
            [one == "sliding_attention" for one in config["layer_types"]]
        )
    if kind == "falcon":
        writer.add_tensor_data_layout("jploski")
        new = config["new_decoder_architecture"]
        writer.add_head_count_kv(config["num_kv_heads"] if new else 1)
    if kind.startswith("deepseek"):
        sigmoid = kind == "deepseek_v3"
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if sigmoid else kinds.SOFTMAX)
        writer.add_expert_weights_norm(sigmoid and config["norm_topk_prob"])
    if kind == "glm4_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if kind == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(1)
    if kind.startswith(("qwen3_next", "qwen3_5")):
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        writer.add_ssm_inner_size(values)
    if kind.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([1, 1, 0, 0])
    if kind == "granitemoehybrid":
        writer.add_ssm_inner_size(config["mamba_expand"] * hidden)
        wide = config["shared_intermediate_size"]
        if config["num_local_experts"]:
            writer.add_expert_shared_feed_forward_length(wide)
        else:
            writer.add_feed_forward_length(wide)
        attends = [one in ("attention", "full_attention") for one in config["layer_types"]]
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([kv_heads if one else 0 for one in attends])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if kind == "minicpm":
        writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
        writer.add_logit_scale(hidden / config["dim_model_base"])
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _of_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, Any]:
    """The sizes of layers that differ, and how many dimensions of a head are rotated."""
    slides = [one == "sliding_attention" for one in config["layer_types"]]
    full, shared = config["per_layer_config"][str(slides.index(False))], {}
    local, wide, heads = (
        config[one] for one in ("head_dim", "intermediate_size", "num_key_value_heads")
    )
    size, lent = full["head_dim"], config["num_kv_shared_layers"]
    if config["use_double_wide_mlp"]:
        shared["intermediate_size"] = [wide] * (len(slides) - lent) + [2 * wide] * lent
    if "num_key_value_heads" in full:
        own = full["num_key_value_heads"]
        shared["num_key_value_heads"] = [heads if one else own for one in slides]
    writer.add_shared_kv_layers(lent)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count_swa(local)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if (softcap := config["final_logit_softcapping"]) is not None:
        writer.add_final_logit_softcapping(softcap)
    if config["num_experts"]:
        writer.add_expert_used_count(config["top_k_experts"])
    full_rope = rope["full_attention"]
    factors = np.full(size // 2, 1e30, np.float32)
    factors[: int(size * full_rope["partial_rotary_factor"] / 2)] = 1
    writer.add_tensor("rope_freqs.weight", factors)
    for layer in range(len(slides) - lent, len(slides)):  # of checkpoints that have them, unused
        width = local if slides[layer] else size
        for name, shape in (
            ("attn_k", (heads * width, config["hidden_size"])),
            ("attn_v", (heads * width, config["hidden_size"])),
            ("attn_k_norm", (width,)),
        ):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(shape, np.float32))
    return (
        config
        | shared
        | {"head_dim": size, "rope_parameters": full_rope | {"partial_rotary_factor": 1.0}}
    )


def _add_latent(
    writer: gguf.GGUFWriter, config: dict[str, Any], tensors: dict[str, Floats], *, apart: bool
) -> None:
    """The sizes of a head; `apart`: those of absorbed attention, and the last matrix is in two."""
    plain, rotated, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length(rank + rotated if apart else plain + rotated)
    writer.add_value_length(rank if apart else value)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if not apart:
        return
    writer.add_head_count_kv(1)
    writer.add_key_length_mla(plain + rotated)
    writer.add_value_length_mla(value)
    for name in [one for one in tensors if one.endswith(".kv_b_proj.weight")]:
        both = tensors.pop(name).reshape(heads, plain + value, rank)
        keys, values = np.split(both, [plain], axis=1)
        tensors[name.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
        tensors[name.replace("kv_b_proj", "v_b_proj")] = values


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_HEAD = re.compile(r"(.*_layernorm)\.norms\.(\d+)\.weight")


def _converted(config: dict[str, Any], given: dict[str, Floats]) -> Iterator[tuple[str, Floats]]:
    """The tensors under names that the package's map knows, in llama.cpp's order of rows."""
    kind, heads = config["model_type"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    together: dict[str, dict[int, Floats]] = {}
    if kind.startswith("qwen3_5"):
        given = {name: _by_turns(config, name, values) for name, values in given.items()}
    for name, values in given.items():
        if found := _EXPERT.fullmatch(name):
            together.setdefault(f"{found[1]}.{found[3]}.weight", {})[int(found[2])] = values
        elif found := _HEAD.fullmatch(name):
            together.setdefault(f"{found[1]}.weight", {})[int(found[2])] = values
        elif kind == "gemma4_text" and name.endswith((".layer_scalar", "_up_proj", "s.down_proj")):
            yield f"{name}.weight", values
        elif name.endswith((".router.scale", ".per_expert_scale")):  # Gemma 4
            of = "gate_inp" if name.endswith(".router.scale") else "down_exps"
            yield f"blk.{name.split('.')[2]}.ffn_{of}.scale", values
        elif name.endswith(".sinks"):
            yield f"{name}.weight", values
        elif name.endswith("e_score_correction_bias"):
            yield f"{name.removesuffix('_bias')}.bias", values
        elif ".feed_forward.experts." in name:  # Llama 4
            values = values.swapaxes(1, 2)
            if "gate_up" not in name:
                yield f"{name}.weight", values
                continue
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj") + ".weight", half
        elif ".mlp.experts." in name:  # gpt-oss
            whole = name.removesuffix("_bias")
            suffix = ".bias" if name.endswith("_bias") else ".weight"
            values = values if suffix == ".bias" else values.swapaxes(1, 2)
            if "gate_up" not in name:
                yield whole + suffix, values
                continue
            for part, start in (("gate_proj", 0), ("up_proj", 1)):
                yield whole.replace("gate_up_proj", part) + suffix, values[:, start::2]
        elif name.endswith((".A_log", ".mamba.D", ".mixer.D", ".dt_bias")):  # recurrent layers
            log = name.endswith(".A_log")
            stored = {"dt_bias": "dt_proj.bias"}.get(name.rsplit(".", 1)[1], name.rsplit(".", 1)[1])
            values = -np.exp(values) if log else values
            both = kind in MAMBA and stored != "dt_proj.bias"
            yield f"{name.rsplit('.', 1)[0]}.{stored}", values[:, None] if both else values
        elif name.endswith("conv1d.weight"):
            yield name, values[:, 0]
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            yield name, values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
        elif name.endswith(".in_proj_qkvz.weight"):
            yield from _delta_net(config, name, values)
        elif name.endswith(".linear_attn.norm.weight"):
            yield name, values
        elif ".shared_mlp.input_linear." in name:  # Granite 4
            shared = "_shexp" if config["num_local_experts"] else ""
            for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{part}{shared}.weight", half
        elif ".shared_mlp.output_linear." in name:
            shared = "_shexp" if config["num_local_experts"] else ""
            yield f"blk.{name.split('.')[2]}.ffn_down{shared}.weight", values
        elif ".input_linear." in name:  # GraniteMoE
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                layer = name.split(".")[2]
                yield f"model.layers.{layer}.mlp.experts.{part}_proj.weight", half
        elif ".query_key_value." in name:  # Falcon, and BLOOM, of which each head has its own
            newer = config.get("new_decoder_architecture")
            groups = heads if kind == "bloom" else config["num_kv_heads"] if newer else 1
            each = values.reshape(groups, heads // groups + 2, -1, *values.shape[1:])
            parts = (each[:, :-2], each[:, [-2]], each[:, [-1]])
            yield name, np.concatenate([one.reshape(-1, *values.shape[1:]) for one in parts])
        elif name.endswith(".W_pack.weight"):  # Baichuan
            for letter, rows in zip("qkv", np.split(values, 3), strict=True):
                own = name.replace("W_pack", f"{letter}_proj")
                yield own, rows if letter == "v" else _interleaved(rows, heads)
        elif kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            yield name, values.T
        elif name.endswith(".wqkv.weight"):  # InternLM2
            each = values.reshape(kv_heads, heads // kv_heads + 2, -1, values.shape[-1])
            parts = (each[:, :-2], each[:, -2], each[:, -1])
            for letter, part, count in zip("qkv", parts, (heads, kv_heads, 0), strict=True):
                rows = part.reshape(-1, values.shape[-1])
                own = name.replace("attention.wqkv", f"self_attn.{letter}_proj")
                yield own, _interleaved(rows, count) if count else rows
        else:
            if kind in LESS_ONE and name.endswith("norm.weight"):
                values = values + np.float32(1)
            rotary = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2], 0)
            if rotary and kind in PERMUTED:
                values = _interleaved(values, rotary)
            yield name, values.reshape(-1) if values.shape[0] == 1 else values
    for name, experts in together.items():
        if kind == "nemotron_h":
            _, _, layer, *_, linear, _ = name.split(".")
            name = f"blk.{layer}.ffn_{linear.removesuffix('_proj')}_exps.weight"
        yield name, np.stack([experts[index] for index in range(len(experts))])


def _by_turns(config: dict[str, Any], name: str, values: Floats) -> Floats:
    """The heads of values, of which each key head has several, take turns among key heads."""
    heads, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    all_heads = config["linear_num_value_heads"]
    part = name.partition(".linear_attn.")[2].removesuffix(".weight")
    keys = 2 * heads * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0
    if part in ("", "norm"):
        return values
    axis = 1 if part == "out_proj" else 0
    width = 1 if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else width
    places = np.arange(all_heads * width).reshape(heads, -1, width).swapaxes(0, 1).reshape(-1)
    return np.take(values, np.concatenate([np.arange(keys), keys + places]), axis=axis)


def _delta_net(config: dict[str, Any], name: str, values: Floats) -> Iterator[tuple[str, Floats]]:
    """Queries, keys and values of all heads, and the gates apart."""
    heads, width = config["linear_num_key_heads"], values.shape[-1]
    group = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    key = config["linear_key_head_dim"]
    each = values.reshape(heads, -1, width)
    *convolved, gates = np.split(each, [key, 2 * key, 2 * key + group], axis=1)
    layer = name.split(".")[2]
    together = np.concatenate([one.reshape(-1, width) for one in convolved])
    yield f"blk.{layer}.attn_qkv.weight", together
    yield f"blk.{layer}.attn_gate.weight", gates.reshape(-1, width)


def _interleaved(values: Floats, heads: int) -> Floats:
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
