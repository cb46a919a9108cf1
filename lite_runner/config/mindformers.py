"""Translates a yaml of run_mindformer to our config.

Known keys become settings; keys of training or other engines are ignored and listed; unsupported
keys that would change the result, and unknown keys, are validation errors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from lite_runner.architectures import modules_of, networks, of_mindformers, of_yaml
from lite_runner.architectures.experts import has_experts, unsupported
from lite_runner.architectures.settings import PREFIX, Translation
from lite_runner.config import at, did_you_mean, nearest_key, show

_IGNORED = {
    "": """
        auto_tune autotune_per_step balanced_load callbacks checkpoint data_parallel_size
        do_eval eval_callbacks eval_dataset eval_dataset_task eval_epoch_interval
        eval_step_interval filepath_prefix grouped_lr_schedule infer_precision_sync
        init_start_profile layer_decay layer_scale load_ckpt_format
        load_transformed_checkpoint lr_scale lr_scale_factor lr_schedule lr_scheduler metric
        micro_batch_interleave_num moe_config monitor_config optimizer parallelism
        print_separate_loss profile_communication profile_level profile_memory
        profile_start_step profile_stop_step profiler_level recompute recompute_config
        remote_save_url remove_redundancy resume_training runner_config runner_wrapper
        swap_config train_dataset train_dataset_task train_precision_sync training
        transform_process_num trust_remote_code use_graceful_exit use_legacy
    """,
    "context": """
        affinity_cpu_list deterministic enable_graph_kernel graph_kernel_flags
        jit_config jit_level max_call_depth memory_offload
        memory_optimize_level mempool_block_size op_timeout precompile_only
        runtime_num_threads save_graphs save_graphs_path
    """,
    "parallel": """
        auto_pipeline dataset_strategy enable_alltoall enable_parallel_optimizer full_batch
        gradients_mean loss_repeated_mean parallel_optimizer_config pipeline_config
        search_mode strategy_ckpt_config strategy_ckpt_load_file
    """,
    "parallel_config": """
        context_parallel context_parallel_algo expert_parallel gradient_aggregation_group
        mem_coeff micro_batch_num optimizer_shard recompute seq_split_num use_seq_parallel
    """,
    "processor": "audio_processor image_processor return_tensors type",
    "processor.tokenizer": """
        auto_register end_token mask_token merges_file model_max_length pad_token padding_side
        trust_remote_code unk_token use_fast
    """,
    "model.arch": "auto_register",
    "model.model_config": """
        add_qkv_bias apply_rope_fusion architectures attention_bias attention_dropout
        attention_dropout_prob attention_dropout_rate attention_softmax_in_fp32 auto_map
        auto_register batch_size bias_dropout_fusion bias_swiglu_fusion block_size boost_model_name
        calculate_per_token_loss chunk_prefill compute_in_2d emb_dropout_prob embed_dropout_prob
        embed_parallel_config embedding_dropout_prob embedding_init_type embedding_type
        enable_high_performance enable_slice_dp extend_method ffn_concat ffn_dim_multiplier
        fine_grain_interleave fp32_residual_connection fused_norm fused_rms_norm gmask_token_id
        has_bias hidden_act hidden_dropout hidden_dropout_prob hidden_dropout_rate
        hidden_size_per_attention_head ignore_index ignore_token_id init_method_std
        initializer_range input_sliced_sig is_dynamic is_enhanced_encoder is_flexible_shape
        layernorm_compute_dtype layernorm_compute_type llm_backend mask_type max_position_embedding
        max_position_embeddings mlp_concat model_type moe_config moe_router_fusion multiple_of
        no_recompute_layers num_block num_blocks num_labels offset op_parallel_config
        out_proj_has_bias output_router_logits parallel_config parallel_optimizer param_init_type
        params_dtype pet_config pipeline_stage pp_interleave_num prefix_name pretrain_seqlen
        qkv_concat quantization_config recompute res_dtype residual_dtype rmsnorm_compute_2d
        rotary_dtype rotary_emb_base router_aux_loss_coef router_dense_type scaling_factor
        softmax_compute_dtype softmax_compute_type unk_token_id untie_embeddings_and_output_weights
        use_attn_mask_compression use_cache use_contiguous_weight_layout_attention
        use_eod_attn_mask_compression use_flash_attention use_fused_mla use_fused_rope
        use_fused_swiglu use_incre_flash_attention use_kbk_infer use_kvcache_op use_load_balance
        use_pad_tokens use_paged_attention use_past_shard use_prompt_flash_attention
        use_ring_attention use_rope_slice use_select_recompute use_seq_parallel wo_has_bias
    """,
    "generation_config": "bos_token_id pad_token_id",
    "infer": "device_id dynamic infer_type model_name target",
    "trainer": "dataset_dir image_size",
}
IGNORED = frozenset(
    f"{section}.{name}".lstrip(".") for section, names in _IGNORED.items() for name in names.split()
)

# Values that mean "off", and a hint for any other, which is not supported.
_NOT_HERE = "of no model that runs here"
_OF_CHATGLM2 = "only a ChatGLM2 may have it"
_OF_PET = "pet_config says what is tuned, with pet_type ptuning2"
_OF_THE_FILES = "the tokenizer is as its files say"
OFF: dict[str, tuple[tuple[Any, ...], str]] = {
    "plugins": (("", None, []), "it runs code, so it is taken from the command line only"),
    "register_path": (("", None), "it runs code, so it is taken from the command line only"),
    "model.model_config.add_bias_linear": ((False, None), _OF_CHATGLM2),
    "model.model_config.post_layer_norm": ((True, None), _OF_CHATGLM2),
    "model.model_config.rmsnorm": ((True, None), _OF_CHATGLM2),
    "model.model_config.apply_query_key_layer_scaling": (
        (True, None),
        "MindFormers then leaves out the scale of scores, Hugging Face does not",
    ),
    "model.model_config.apply_residual_connection_post_layernorm": ((False, None), _NOT_HERE),
    "model.model_config.pre_seq_len": ((None, "None", 0), _OF_PET),
    "model.model_config.prefix_projection": ((False, None), _OF_PET),
    "model.model_config.quantization_bit": ((0, None), "quant=a16w8 or a16w4 quantizes here"),
    "model.model_config.interleaved_qkv": ((False, None), _NOT_HERE),
    "model.model_config.rotary_percent": ((0.5, None), "a ChatGLM2 rotates half of each head"),
    "model.model_config.rotary_pct": ((1.0, 1, None), "a Llama rotates all of each head"),
    "model.model_config.gated_linear_unit": ((True, None), _NOT_HERE),
    "model.model_config.mask_generate": ((None,), "a mask per document is for training"),
    "model.model_config.post_mlp_layernorm": ((False, None), _NOT_HERE),
    "model.model_config.post_self_attn_layernorm": ((False, None), _NOT_HERE),
    "model.model_config.use_rearrange_rope": (
        (False, None),
        "the rows of its weights are in another order",
    ),
    "model.model_config.position_encoding_2d": ((True, None), "a ChatGLM-6B always has it"),
    "model.model_config.layernorm_order": (("post", None), _NOT_HERE),
    "model.model_config.use_final_layernorm": ((True, None), _NOT_HERE),
    "model.model_config.activation_func": (("GELU", "gelu", None), _NOT_HERE),
    "model.model_config.normalization": (("RMSNorm", None), _NOT_HERE),
    "model.model_config.position_embedding_type": (("rope", None), "rope_scaling has the others"),
    "model.model_config.qk_layernorm": ((True, None), "a Qwen3 always has it"),
    "model.model_config.post_layernorm_residual": ((False, None), _NOT_HERE),
    "model.model_config.use_moe": ((False, None), _NOT_HERE),
    "model.model_config.return_hidden_states": ((False, None), "logits are all that is given"),
    "model.model_config.quant": (("", None), "quant=a16w8, a16w4 or a8w8 quantizes here"),
    "model.model_config.quant_config": ((None,), "quant=a16w8, a16w4 or a8w8 quantizes here"),
    "model.model_config.pet_config.pet_type": (
        ("lora", "slora", "ptuning2", "prefixtuning", "", None),
        "there are lora, slora, ptuning2 and prefixtuning",
    ),
    "processor.tokenizer.clean_up_tokenization_spaces": ((False, None), _OF_THE_FILES),
    "processor.tokenizer.do_lower_case": ((False, None), _OF_THE_FILES),
    "processor.tokenizer.encode_special_tokens": ((False, None), _OF_THE_FILES),
    "processor.tokenizer.errors": (("replace", None), "bytes that are no UTF-8 become U+FFFD"),
    "processor.tokenizer.gmask_token": (("[gMASK]", None), _OF_THE_FILES),
    "processor.tokenizer.legacy": ((True, None), _OF_THE_FILES),
    "processor.tokenizer.remove_space": ((False, None), _OF_THE_FILES),
}
# Tokenizer types by our names.
TOKENIZERS = {
    "Baichuan2Tokenizer": "LlamaTokenizer",
    "BloomProcessor": "BloomTokenizer",
    "GPT2Processor": "GPT2Tokenizer",
    "IFlytekSparkTokenizer": "LlamaTokenizer",
    "InternLM2Tokenizer": "LlamaTokenizer",
    "InternLMTokenizer": "LlamaTokenizer",
    "LLaMATokenizer": "LlamaTokenizer",
    "LlamaProcessor": "LlamaTokenizer",
    "PreTrainedTokenizerFast": "AutoTokenizer",
    "QwenTokenizer": "AutoTokenizer",
    "TelechatTokenizer": "AutoTokenizer",
}
# parallel_mode by number.
PARALLEL_MODES = {
    "DATA_PARALLEL": 0,
    "SEMI_AUTO_PARALLEL": 1,
    "MANUAL_PARALLEL": 1,
    "AUTO_PARALLEL": 2,
    "HYBRID_PARALLEL": 3,
}


def is_only_mindformers(key: str) -> bool:
    """True if a dotted key, or one of its sections, is MindFormers' alone."""
    parts = key.split(".")
    heads = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return key in OFF or not heads.isdisjoint(IGNORED)


_SIZES = ("seq_length", "hidden_size", "num_layers", "num_heads", "vocab_size")
# Ignored where the folder has the sizes (model=auto).
_SIZES_OF_FOLDER = ("model.model_config.seq_length",)
# MindFormers' keys by our names: newer configs have Hugging Face's of sizes. Those of
# generation_config are the model's defaults here.
_RENAMED = {
    **{
        f"{PREFIX}{theirs}": f"{PREFIX}{name}"
        for theirs, name in {
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "num_key_value_heads": "n_kv_heads",
            "rope_theta": "theta",
            "padded_vocab_size": "vocab_size",
            "max_length": "max_decode_length",
        }.items()
    },
    "input_data": "predict_data",
    "context.profile": "profile",
    "processor.tokenizer.vocab_file": "processor.tokenizer.tokenizer_file",
    "generation_config.eos_token_id": "eos_token_id",
    "generation_config.max_length": "model.model_config.max_decode_length",
    **{
        f"generation_config.{name}": f"model.model_config.{name}"
        for name in (
            *("do_sample", "max_new_tokens", "repetition_penalty", "temperature"),
            *("top_k", "top_p"),
        )
    },
}
# MindFormers' values by our names.
_RENAMED_VALUES: dict[str, Mapping[str, Any]] = {
    "processor.tokenizer.type": TOKENIZERS,
    "parallel.parallel_mode": PARALLEL_MODES,
}

# dtypes of quantization_config.
_FLOATS = (None, "", "none", "None", "fp16", "bf16", "float16", "bfloat16")
_CALIBRATED = ("smooth_quant", "ptq")
_QUANTS = {("int8", "float"): "a16w8", ("int4", "float"): "a16w4", ("int8", "int8"): "a8w8"}
# Settings of pet_config by pet_type, and our names of them.
_LORA = {name: name for name in ("pet_type", "lora_rank", "lora_alpha", "target_modules")}
_PTUNING = ("pet_type", "pre_seq_len", "prefix_projection", "projection_dim")
_PET = {
    "lora": _LORA,
    "ptuning2": {name: name for name in _PTUNING},
    "prefixtuning": {
        "pet_type": "pet_type",
        "prefix_token_num": "pre_seq_len",
        "mid_dim": "projection_dim",
    },
}
_TOKENIZER = "processor.tokenizer."
_TOKENS = ("add_bos_token", "add_eos_token", "bos_token", "eos_token")
# Keys that each class of MindFormers never reads: ChatGLM's prompts have their own form, and only
# GPT-2's and BLOOM's may begin with a space.
_UNREAD_BY_TOKENIZER = {
    "ChatGLMTokenizer": (*_TOKENS, "add_prefix_space"),
    "ChatGLM2Tokenizer": (*_TOKENS, "add_prefix_space"),
    "ChatGLM3Tokenizer": (*_TOKENS, "add_prefix_space"),
    "ChatGLM4Tokenizer": (*_TOKENS[:3], "add_prefix_space"),
    "Llama3Tokenizer": ("add_prefix_space",),
    "LlamaTokenizer": ("add_prefix_space",),
    "LlamaTokenizerFast": ("add_prefix_space",),
}
# Defaults of a class that differ from what a model's files may say.
_TOKENIZER_DEFAULTS = {"Llama3Tokenizer": {"add_bos_token": False, "add_eos_token": False}}
_MERGES = "merges_file"


# Translated here, so not listed as ignored.
_TRANSLATED = ("hidden_act", "hidden_size_per_attention_head", "pet_config", "quantization_config")


def base_model(raw: Mapping[str, Any], models: Collection[str]) -> str | None:
    """The model of conf/ that a file is merged over; None where the file names none."""
    name, arch = at(raw, "trainer.model_name"), arch_of(raw)
    if arch is None and at(raw, "pretrained_model_dir"):
        return "auto"  # the folder has the sizes, whatever the model's name
    found = of_yaml(raw, arch)
    if isinstance(name, str) and name in models and not (found and found.claims(raw)):
        return name
    return networks().get(arch) if isinstance(arch, str) else None


def arch_of(raw: Mapping[str, Any]) -> Any:
    """The architecture that a file names, by our name."""
    named = at(raw, "model.arch.type")
    found = of_yaml(raw, named)
    return named if found is None else found.network


def translate(
    raw: Mapping[str, Any],
    known: Collection[str],
    models: Collection[str],
    *,
    defaults: Mapping[str, Any],
    use_parallel: bool,
    sized: bool,
) -> Translation:
    """Translate a file (`raw`), given the `known` keys of our config.

    `defaults`: the settings of the model that it is merged over. Without `use_parallel` the file's
    parallel sections have no effect, as in run_mindformer. The file must have the sizes unless the
    model is `sized` by conf/.
    """
    result = Translation()
    settings = at(raw, "model.model_config")
    kind = of_mindformers(_type(settings, defaults))
    translated = {f"{PREFIX}{name}" for name in (*_TRANSLATED, *(kind.translated if kind else ()))}
    unread = {f"{PREFIX}{name}" for name in (kind.unread if kind else ())}
    sections = {key[:i] for key in (*known, *IGNORED) for i, c in enumerate(key) if c == "."}
    for key, value in _leaves(raw, "", known, sections):
        if key.partition(".")[0] in ("parallel", "parallel_config") and not use_parallel:
            result.ignored.append(key.partition(".")[0])
        elif key in _RENAMED:
            if value not in ("", None):
                result.assignments[_RENAMED[key]] = value
        elif key == "model.arch.type" and isinstance(value, str):
            result.assignments[key] = arch_of(raw)
        elif key in _RENAMED_VALUES and isinstance(value, str):
            result.assignments[key] = _RENAMED_VALUES[key].get(value, value)
        elif key == "profile" and value is None:
            continue  # off, as in MindFormers
        elif key == "callbacks" and "ProfileMonitor" in _types(value):
            result.assignments.setdefault("profile", True)
        elif key in known:
            result.assignments[key] = value
        elif key in IGNORED or key in _SIZES_OF_FOLDER or key in unread:
            result.ignored += [] if key in translated else [key]
        elif key in sections:
            if value is not None:
                result.errors.append(f"{key}: got {show(value)}, expected a section")
        elif key in OFF:
            continue  # checked below
        else:
            near = nearest_key(key, sorted({*known, *IGNORED}))
            hint = did_you_mean(near)
            result.errors.append(f"{key}: no such key{hint}; ~{key} leaves it out")
    if result.assignments.get(f"{PREFIX}top_p") == 0:  # the likeliest token alone
        result.assignments |= {f"{PREFIX}top_p": 1.0, f"{PREFIX}top_k": 1}
    _check_disabled(raw, known, result)
    _translate_tokenizer(raw, result)
    if isinstance(settings, Mapping):
        _translate_model(raw, defaults, models, result)
        keys = () if sized else (f"model.model_config.{name}" for name in _SIZES)
        for key in (key for key in keys if result.assignments.get(key) is None):
            result.errors.append(f"{key}: missing; a model that is not in conf/model needs it")
    return result


def _type(settings: Any, defaults: Mapping[str, Any]) -> Any:
    """MindFormers' config class of a file."""
    usual = defaults.get("type")
    return settings.get("type", usual) if isinstance(settings, Mapping) else usual


def _types(callbacks: Any) -> list[Any]:
    entries = callbacks if isinstance(callbacks, list) else ()
    return [one.get("type") for one in entries if isinstance(one, Mapping)]


def _translate_model(
    raw: Mapping[str, Any],
    defaults: Mapping[str, Any],
    models: Collection[str],
    result: Translation,
) -> None:
    """Translate keys of model_config that have no direct equivalent."""
    settings = raw["model"]["model_config"]
    kind = of_mindformers(_type(settings, defaults))
    expected = kind.hidden_act if kind else ()
    if expected and settings.get("hidden_act") not in (None, *expected):
        result.errors.append(
            f"{PREFIX}hidden_act: got {show(settings['hidden_act'])}, expected {expected[0]}, which"
            f" such models are trained with; --{PREFIX}hidden_act {expected[0]} takes it"
        )
    # In MindFormers a model's name means its published weights; conf/ has their source.
    source = settings.get("checkpoint_name_or_path")
    if source in ("", None) or (isinstance(source, str) and source in models):
        result.assignments.pop(f"{PREFIX}checkpoint_name_or_path", None)
    _translate_adapter(settings.get("pet_config"), result)
    modules = modules_of(_type(settings, defaults))
    _translate_quantization(settings.get("quantization_config"), modules, result)
    _check_head_size(settings, defaults, result)
    if kind is not None:
        kind.translate(raw, defaults, result)
    merged_over = of_mindformers(defaults.get("type"))
    if merged_over is not None and merged_over.claims(raw):
        if merged_over is not kind:
            merged_over.translate(raw, defaults, result)
    elif has_experts(raw):
        result.errors.append(unsupported(raw))


def _translate_adapter(given: Any, result: Translation) -> None:
    """LoRA weights (lora) or learned keys in the checkpoint, or adapters in their own folders
    (slora)."""
    section = f"{PREFIX}pet_config"
    if given is None:
        return
    if not isinstance(given, Mapping):
        result.errors.append(f"{section}: got {show(given)}, expected a section")
    elif (names := _PET.get(str(given.get("pet_type")))) is not None:
        found = {names[name]: value for name, value in given.items() if name in names}
        if found["pet_type"] == "prefixtuning":  # always present with a network
            found = {"prefix_projection": True, "projection_dim": 512} | found
        if found["pet_type"] != "lora" and result.assignments.get(f"{PREFIX}use_past") is False:
            result.assignments[f"{PREFIX}use_past"] = True  # learned keys need a cache
            result.ignored.append(f"{PREFIX}use_past")
        result.assignments[section] = found
        result.ignored += [f"{section}.{name}" for name in given if name not in names]
        if given.get("exclude_layers"):
            result.errors.append(
                f"{section}.exclude_layers: got {show(given['exclude_layers'])}, expected null:"
                " target_modules says where the adapter is"
            )
    elif given.get("adapter_path") not in ("", None):
        result.assignments["adapter_path"] = given["adapter_path"]
    else:
        result.ignored.append(section)


def _check_head_size(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation
) -> None:
    """A ChatGLM-6B's heads share hidden_size."""
    name = "hidden_size_per_attention_head"
    hidden, heads = (settings.get(key, defaults.get(key)) for key in ("hidden_size", "num_heads"))
    sizes = [size for size in (hidden, heads) if isinstance(size, int) and size]
    expected = hidden // heads if len(sizes) == 2 else None
    if settings.get(name) not in (None, expected):
        result.errors.append(
            f"{PREFIX}{name}: got {show(settings[name])}, expected hidden_size / num_heads"
        )


def _translate_quantization(given: Any, modules: Collection[str], result: Translation) -> None:
    """Round-to-nearest quantization becomes quant=, and so do smooth_quant and ptq, whose
    checkpoints have integers and scales in them; other methods are errors.

    8-bit activations are quantized dynamically per row, so nothing is calibrated.
    """
    section = f"{PREFIX}quantization_config"
    if given is None:
        return
    if not isinstance(given, Mapping):
        result.errors.append(f"{section}: got {show(given)}, expected a section")
        return
    method, weight, kv = (
        given.get(name) for name in ("quant_method", "weight_dtype", "kvcache_dtype")
    )
    activation = given.get("activation_dtype")
    if method not in (None, "rtn", *_CALIBRATED):
        result.errors.append(
            f"{section}.quant_method: got {show(method)}, expected rtn (rounded to nearest),"
            " smooth_quant or ptq: nothing is calibrated here"
        )
    kept = given.get("modules_to_not_convert")
    policies = given.get("layer_policies") or {}
    if not isinstance(policies, Mapping):
        result.errors.append(
            f"{section}.layer_policies: got {show(policies)}, expected a policy for each name"
        )
        policies = {}
    for part, own in policies.items():
        if not _is_alike(own, given):
            result.errors.append(
                f"{section}.layer_policies: got {show(own)} for {part}, expected the types of the"
                " other layers and act_quant_granularity per_token: all are quantized alike, but"
                " for modules_to_not_convert"
            )
        elif (inside := re.fullmatch(r"\.\*\\\.(\w+)\\\.\.\*", str(part))) is None:
            result.errors.append(
                f"{section}.layer_policies: got {show(part)}, expected the form .*\\.NAME\\..*"
            )
        else:  # it converts its modules, whatever is kept elsewhere
            kept = [name for name in kept or () if not _is_in(name, inside[1], modules)]
            kept += own.get("modules_to_not_convert") or ()
    if kv == "int8":
        result.assignments["kv_cache"] = "int8"
    elif kv not in _FLOATS:
        result.errors.append(f"{section}.kvcache_dtype: got {show(kv)}, expected int8 or none")
    if weight in _FLOATS and activation in _FLOATS:
        return
    quant = _QUANTS.get((str(weight), "float" if activation in _FLOATS else str(activation)))
    if quant is None:
        result.errors.append(
            f"{section}: got weight_dtype {show(weight)} with activation_dtype {show(activation)},"
            " expected int8 or int4 with fp16, or int8 with int8"
        )
        return
    result.assignments["quant"] = quant
    understood = {"quant_method", "weight_dtype", "activation_dtype", "kvcache_dtype"}
    understood -= {"quant_method"} if method in _CALIBRATED else set()  # the checkpoint is
    if kept:
        result.assignments["modules_to_not_convert"] = kept
    understood |= {"modules_to_not_convert", "layer_policies"}
    result.ignored += [f"{section}.{name}" for name in given if name not in understood]


def _is_alike(policy: Any, given: Mapping[str, Any]) -> bool:
    """True if a layer's own policy of quantization equals that of all layers."""
    types = ("weight_dtype", "activation_dtype", "kvcache_dtype")
    return (
        isinstance(policy, Mapping)
        and all(policy.get(name) == given.get(name) for name in types)
        and policy.get("act_quant_granularity") == "per_token"
        and policy.get("weight_quant_granularity", "per_channel") == "per_channel"
        and isinstance(policy.get("modules_to_not_convert") or [], list)
    )


def _is_in(name: str, part: str, modules: Collection[str]) -> bool:
    """True if all modules of this name are in modules of the other."""
    found = [one for one in modules if name in one]
    return bool(found) and all(f".{part}." in one for one in found)


def _translate_tokenizer(raw: Mapping[str, Any], result: Translation) -> None:
    """Drop what a tokenizer's class never reads, add its defaults, and check its merges_file."""
    kind = result.assignments.get(f"{_TOKENIZER}type")
    if not isinstance(kind, str):
        return
    for name in _UNREAD_BY_TOKENIZER.get(kind, ()):
        if result.assignments.pop(f"{_TOKENIZER}{name}", None) is not None:
            result.ignored.append(f"{_TOKENIZER}{name}")
    for name, value in _TOKENIZER_DEFAULTS.get(kind, {}).items():
        result.assignments.setdefault(f"{_TOKENIZER}{name}", value)
    merges, vocab = (at(raw, f"{_TOKENIZER}{name}") for name in (_MERGES, "vocab_file"))
    named = all(isinstance(path, str) and path for path in (merges, vocab))
    if named and PurePath(merges) != PurePath(vocab).parent / "merges.txt":
        result.errors.append(
            f"{_TOKENIZER}{_MERGES}: got {show(merges)}, expected merges.txt beside {vocab}:"
            " put the two files into one folder"
        )


def format_keys(keys: Collection[str]) -> str:
    """Dotted keys as text, grouped by section."""
    sections: dict[str, list[str]] = {}
    for key in sorted(set(keys)):
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    top = sections.pop("", [])
    return ", ".join([*top, *(f"{name} ({', '.join(keys)})" for name, keys in sections.items())])


def _leaves(
    raw: Mapping[str, Any], prefix: str, known: Collection[str], sections: Collection[str]
) -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        key = f"{prefix}{name}"
        is_section = key in sections and key not in known and key not in IGNORED
        if is_section and isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.", known, sections)
        else:
            yield key, value


def _check_disabled(raw: Mapping[str, Any], known: Collection[str], result: Translation) -> None:
    """Refuse other values than "off" of keys that the model does not know."""
    tuned = at(raw, f"{PREFIX}pet_config.pet_type") == "ptuning2"
    for key, (off, instead) in OFF.items():
        if tuned and instead == _OF_PET:  # a ChatGLM2 has them twice
            continue
        value = at(raw, key)
        if key not in known and not any(
            type(value) is type(entry) and value == entry for entry in off
        ):
            result.errors.append(f"{key}: {show(value)} is not available: {instead}")
