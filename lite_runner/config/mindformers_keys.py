"""Keys of run_mindformer's yaml (releases 1.0 to 2.1) that are not keys of ours.

Most concern training, profiling, other engines or a cloud platform: they are ignored and listed for
the user. A few must be off.
"""

from __future__ import annotations

from typing import Any

_IGNORED = {
    "": """
        auto_tune autotune_per_step balanced_load callbacks checkpoint data_parallel_size
        do_eval eval_callbacks eval_dataset eval_dataset_task eval_epoch_interval
        eval_step_interval filepath_prefix grouped_lr_schedule infer_precision_sync
        init_start_profile layer_decay layer_scale load_ckpt_format
        load_transformed_checkpoint lr_scale lr_scale_factor lr_schedule lr_scheduler metric
        micro_batch_interleave_num moe_config monitor_config optimizer parallelism
        print_separate_loss profile profile_communication profile_level profile_memory
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
        add_bos_token add_eos_token add_prefix_space additional_special_tokens bos_token
        chat_template end_token eos_token errors gmask_token mask_token merges_file
        model_max_length pad_token padding_side trust_remote_code unk_token use_fast
    """,
    "model.model_config": """
        add_qkv_bias apply_rope_fusion architectures attention_bias attention_dropout
        attention_dropout_rate attention_softmax_in_fp32 batch_size bias_dropout_fusion
        bias_swiglu_fusion block_size calculate_per_token_loss
        chunk_prefill compute_in_2d embedding_dropout_prob embedding_init_type
        enable_slice_dp extend_method ffn_dim_multiplier fine_grain_interleave
        fp32_residual_connection fused_norm fused_rms_norm gated_linear_unit gmask_token_id
        hidden_act hidden_dropout hidden_dropout_rate hidden_size_per_attention_head ignore_index
        ignore_token_id init_method_std initializer_range
        input_sliced_sig is_dynamic is_enhanced_encoder is_flexible_shape layernorm_compute_dtype
        layernorm_compute_type llm_backend max_position_embedding max_position_embeddings
        mlp_concat model_type moe_config moe_router_fusion multiple_of num_blocks num_labels offset
        parallel_config parallel_optimizer param_init_type params_dtype pet_config
        post_layernorm_residual pp_interleave_num pretrain_seqlen qkv_concat quant
        quant_config quantization_config recompute residual_dtype return_hidden_states
        rmsnorm_compute_2d rotary_dtype router_dense_type scaling_factor
        softmax_compute_dtype softmax_compute_type unk_token_id use_attn_mask_compression
        untie_embeddings_and_output_weights use_cache
        use_contiguous_weight_layout_attention use_eod_attn_mask_compression
        use_flash_attention use_fused_mla use_fused_rope use_fused_swiglu use_kbk_infer
        use_kvcache_op use_load_balance use_pad_tokens use_paged_attention use_past_shard
        use_prompt_flash_attention use_ring_attention use_rope_slice use_select_recompute
        use_seq_parallel
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
_NO_PREFIX = "prefix tuning does not run here"
OFF: dict[str, tuple[tuple[Any, ...], str]] = {
    "profile": ((False, None), "there is no profiler; result.json has the times of a run"),
    "plugins": (("", None, []), "it runs code, so it is taken from the command line only"),
    "register_path": (("", None), "it runs code, so it is taken from the command line only"),
    "model.model_config.add_bias_linear": ((False, None), _NOT_HERE),
    "model.model_config.apply_query_key_layer_scaling": (
        (True, None),
        "MindFormers then leaves out the scale of scores, Hugging Face does not",
    ),
    "model.model_config.apply_residual_connection_post_layernorm": ((False, None), _NOT_HERE),
    "model.model_config.post_layer_norm": ((True, None), _NOT_HERE),
    "model.model_config.rmsnorm": ((True, None), _NOT_HERE),
    "model.model_config.pre_seq_len": ((None, "None", 0), _NO_PREFIX),
    "model.model_config.prefix_projection": ((False, None), _NO_PREFIX),
    "model.model_config.quantization_bit": ((0, None), "quant=a16w8 or a16w4 quantizes here"),
    "model.model_config.position_encoding_2d": ((True, None), "a ChatGLM-6B always has it"),
    "model.model_config.layernorm_order": (("post", None), _NOT_HERE),
    "model.model_config.use_final_layernorm": ((True, None), _NOT_HERE),
    "model.model_config.activation_func": (("GELU", "gelu", None), _NOT_HERE),
    "model.model_config.normalization": (("RMSNorm", None), _NOT_HERE),
    "model.model_config.position_embedding_type": (("rope", None), "rope_scaling has the others"),
    "model.model_config.qk_layernorm": ((True, None), "a Qwen3 always has it"),
    "model.model_config.post_layernorm_residual": ((False, None), _NOT_HERE),
    "model.model_config.return_hidden_states": ((False, None), "logits are all that is given"),
    "model.model_config.quant": (("", None), "quant=a16w8, a16w4 or a8w8 quantizes here"),
    "model.model_config.quant_config": ((None,), "quant=a16w8, a16w4 or a8w8 quantizes here"),
    "model.model_config.pet_config.pet_type": (
        ("lora", "slora", "", None),
        "of adapters there are lora and slora",
    ),
}
# Tokenizer types by our names.
TOKENIZERS = {
    "BloomProcessor": "BloomTokenizer",
    "GPT2Processor": "GPT2Tokenizer",
    "LLaMATokenizer": "LlamaTokenizer",
    "LlamaProcessor": "LlamaTokenizer",
    "PreTrainedTokenizerFast": "AutoTokenizer",
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
    """Whether a dotted key, or one of its sections, is MindFormers' alone."""
    parts = key.split(".")
    heads = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return not heads.isdisjoint(IGNORED)
