"""Tiny models of families that differ from a Llama in some parts, and of newer mixtures of experts:
see reference_cases.py."""

from __future__ import annotations

from typing import Any

from transformers import (
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    MptConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    StableLmConfig,
)

Windowed = tuple[str, PreTrainedConfig, tuple[int, ...]]
PLAIN, CROSSING = (1, 5, 17, 40), (1, 8, 12, 33)  # lengths: of the second some cross a window of 8
LONG = (1, 5, 40, 300)


def rope(theta: float = 10000.0, **others: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | others


def newer_cases() -> list[Windowed]:
    """Name, config, and lengths of prompts."""
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, **tokens}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    sizes |= {"max_position_embeddings": 64}
    own = sizes | {"head_dim": 12}
    moe = sizes | {"num_experts_per_tok": 2}
    plain, half = {"rope_parameters": rope()}, {"rope_parameters": rope(partial_rotary_factor=0.5)}
    window = {"sliding_window": 8, "num_hidden_layers": 4}
    opt = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48}
    opt |= {"num_attention_heads": 4, "max_position_embeddings": 64, **tokens}
    # As the one of 350 million parameters, but for its biases.
    bare = {"enable_bias": False, "activation_function": "gelu"}
    bare |= {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
    router = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
    router |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
    olmo = {"sliding_attention": rope(500.0), "full_attention": rope(500.0)}
    olmo["full_attention"] |= {"rope_type": "linear", "factor": 4.0}
    latent = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
    latent |= {"num_key_value_heads": 4}
    shared = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 40}
    long = {"max_position_embeddings": 320}
    mamba = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 32}
    mamba |= {"shared_intermediate_size": 24}
    delta = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    delta |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
    early = {"vocab_size": 64, "n_layer": 3, "n_head": 4, "tie_word_embeddings": False}
    llama4 = own | {"num_local_experts": 4, "intermediate_size": 16, "intermediate_size_mlp": 40}
    llama4 |= {"num_hidden_layers": 4, "attention_chunk_size": 24, "floor_scale": 16}
    steps = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    steps |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "rope_theta": 10000.0}
    gemma4 = own | {"head_dim": 8, "global_head_dim": 16, "sliding_window": 8}
    gemma4 |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64}
    gemma4 |= {"layer_types": ["sliding_attention", "full_attention"]}
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    nemotron_h = own | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 12}
    nemotron_h |= {"n_groups": 2, "chunk_size": 32, "max_position_embeddings": 320}
    del nemotron_h["num_hidden_layers"]
    nano = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
    nano |= {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24}
    falcon = {one: value for one, value in sizes.items() if one != "intermediate_size"}
    del falcon["num_key_value_heads"]
    return [
        ("llama4", Llama4TextConfig(**llama4 | long, interleave_moe_layer_step=2), LONG),
        (
            "llama4_plain",
            Llama4TextConfig(
                **llama4 | {"num_experts_per_tok": 2, "attention_chunk_size": 8192},
                attention_bias=True,
                attn_temperature_tuning=False,
                rope_parameters=steps,
                use_qk_norm=False,
            ),
            PLAIN,
        ),
        (
            "bloom_normed",
            BloomConfig(**early, hidden_size=32, apply_residual_connection_post_layernorm=True),
            PLAIN,
        ),
        ("cohere", CohereConfig(**sizes, **plain, logit_scale=0.3), PLAIN),
        (
            "cohere_normed",
            CohereConfig(
                **sizes, **plain, use_qk_norm=True, attention_bias=True, tie_word_embeddings=False
            ),
            PLAIN,
        ),
        ("cohere2", Cohere2Config(**sizes | window, **plain), CROSSING),
        (
            "deepseek_v3",
            DeepseekV3Config(
                **sizes | latent | router,
                q_lora_rank=10,
                rms_norm_eps=1e-5,
                rope_parameters=rope(
                    100.0,
                    rope_type="yarn",
                    factor=4.0,
                    beta_fast=2.0,
                    beta_slow=0.25,
                    mscale=1.0,
                    mscale_all_dim=0.5,
                    original_max_position_embeddings=16,
                ),
            ),
            PLAIN,
        ),
        (
            "deepseek_v2",
            DeepseekV2Config(
                **sizes | latent | router | {"topk_method": "group_limited_greedy"},
                **plain,
                q_lora_rank=None,
                routed_scaling_factor=1.5,
            ),
            PLAIN,
        ),
        (
            "deepseek_v3_direct",  # Moonlight
            DeepseekV3Config(
                **sizes | latent | router,
                **plain,
                q_lora_rank=None,
                attention_bias=True,
                rope_interleave=False,
            ),
            PLAIN,
        ),
        ("ernie4_5", Ernie4_5Config(**own, **plain, use_bias=True), PLAIN),
        ("exaone4", Exaone4Config(**own | window, **plain, sliding_window_pattern=2), CROSSING),
        (
            "exaone4_whole",
            Exaone4Config(**own, **plain, sliding_window=None, layer_types=["full_attention"] * 2),
            PLAIN,
        ),
        ("falcon", FalconConfig(**falcon, **plain), PLAIN),
        (
            "falcon_alibi",
            FalconConfig(**falcon, alibi=True, bias=True, multi_query=False, parallel_attn=False),
            PLAIN,
        ),
        (
            "falcon_new",
            FalconConfig(
                **falcon,
                **plain,
                new_decoder_architecture=True,
                num_kv_heads=2,
                ffn_hidden_size=48,
                tie_word_embeddings=False,
            ),
            PLAIN,
        ),
        ("gemma", GemmaConfig(**own, **plain), PLAIN),
        (
            "gemma4_moe",  # values that are made as keys are
            Gemma4TextConfig(
                **gemma4 | keys,
                attention_bias=True,
                enable_moe_block=True,
                num_experts=4,
                top_k_experts=2,
                moe_intermediate_size=16,
            ),
            CROSSING,
        ),
        (
            "gemma4_sides",  # heads wider than a panel, inputs of each layer, keys that are shared
            Gemma4TextConfig(
                **gemma4
                | {"num_hidden_layers": 6, "global_head_dim": 40, **long}
                | {"layer_types": gemma4["layer_types"] * 3, "hidden_size_per_layer_input": 12},
                **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
                final_logit_softcapping=20.0,
            ),
            LONG,
        ),
        ("glm4_moe", Glm4MoeConfig(**own, **half, **router, use_qk_norm=True), PLAIN),
        (
            "glm4_moe_whole",
            Glm4MoeConfig(
                **own,
                **half,
                **router | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 7},
                attention_bias=True,
                n_shared_experts=2,
                norm_topk_prob=False,
                routed_scaling_factor=0.5,
                num_mtp_layers=0,
            ),
            PLAIN,
        ),
        (
            "gpt2_by_layer",
            GPT2Config(
                **early,
                n_embd=32,
                n_positions=64,
                activation_function="gelu",
                scale_attn_by_inverse_layer_idx=True,
                **tokens,
            ),
            PLAIN,
        ),
        (
            "gpt_neox_linear",
            GPTNeoXConfig(
                **falcon,
                intermediate_size=48,
                hidden_act="relu",
                rope_parameters=rope(rope_type="linear", factor=4.0, partial_rotary_factor=0.5),
            ),
            PLAIN,
        ),
        (
            "gpt_oss",
            GptOssConfig(
                **own | window | {"num_hidden_layers": 2, "intermediate_size": 16},
                num_local_experts=4,
                num_experts_per_tok=2,
                rope_parameters=rope(
                    150.0,
                    rope_type="yarn",
                    factor=4.0,
                    beta_fast=2.0,
                    beta_slow=0.25,
                    truncate=False,
                    original_max_position_embeddings=16,
                ),
                swiglu_limit=1.5,
            ),
            CROSSING,
        ),
        (
            "granitemoe",
            GraniteMoeConfig(
                **moe | {"intermediate_size": 16},
                **plain,
                **{"embedding_multiplier": 6.0, "attention_multiplier": 0.2},
                **{"residual_multiplier": 0.4, "logits_scaling": 3.0},
                num_local_experts=4,
            ),
            PLAIN,
        ),
        (
            "granitemoehybrid",
            GraniteMoeHybridConfig(
                **moe | {"intermediate_size": 16, "num_hidden_layers": 3, **long},
                **mamba,
                **{"embedding_multiplier": 6.0, "attention_multiplier": 0.2},
                **{"residual_multiplier": 0.4, "logits_scaling": 3.0},
                num_local_experts=4,
                layer_types=["linear_attention", "full_attention", "linear_attention"],
            ),
            LONG,
        ),
        (
            "granitemoehybrid_dense",
            GraniteMoeHybridConfig(
                **sizes,
                **mamba | {"mamba_n_groups": 1, "mamba_n_heads": 2, "mamba_conv_bias": False},
                **plain,
                position_embedding_type="rope",
                mamba_proj_bias=True,
                num_local_experts=0,
                layer_types=["full_attention", "linear_attention"],
            ),
            PLAIN,
        ),
        ("hunyuan", HunYuanDenseV1Config(**own, **plain, attention_bias=True), PLAIN),
        (
            "hunyuan_moe",
            HunYuanMoEV1Config(
                **own | {"intermediate_size": 16}, **plain, num_experts=4, moe_topk=2
            ),
            PLAIN,
        ),
        (
            "mpt",
            MptConfig(
                vocab_size=64,
                d_model=32,
                n_heads=4,
                n_layers=2,
                max_seq_len=64,
                attn_config={"softmax_scale": 0.4},
            ),
            PLAIN,
        ),
        ("nemotron", NemotronConfig(**own, **half, attention_bias=True, mlp_bias=True), PLAIN),
        (
            "nemotron_h",
            NemotronHConfig(
                **nemotron_h,
                layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"],
                use_bias=True,
                mlp_bias=True,
            ),
            PLAIN,
        ),
        (
            "nemotron_h_moe",  # Nemotron 3
            NemotronHConfig(
                **nemotron_h | nano,
                layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
                routed_scaling_factor=1.5,
            ),
            LONG,
        ),
        ("olmo3", Olmo3Config(**sizes | window, rope_parameters=olmo), CROSSING),
        ("olmoe", OlmoeConfig(**moe | {"intermediate_size": 16}, **plain, num_experts=5), PLAIN),
        (
            "olmoe_clipped",
            OlmoeConfig(**moe | {"intermediate_size": 16}, **plain, num_experts=5, clip_qkv=0.8),
            PLAIN,
        ),
        ("opt", OPTConfig(**opt), PLAIN),
        ("opt_bare", OPTConfig(**opt, **bare), PLAIN),
        ("phi", PhiConfig(**sizes, **half), PLAIN),
        ("phi_normed", PhiConfig(**sizes, **half, qk_layernorm=True), PLAIN),
        ("qwen2_moe", Qwen2MoeConfig(**moe, **plain, **shared, num_experts=5), PLAIN),
        (
            "qwen2_moe_window",
            Qwen2MoeConfig(
                **moe | window,
                **plain,
                **shared,
                num_experts=4,
                norm_topk_prob=True,
                qkv_bias=False,
                mlp_only_layers=[1],
                max_window_layers=3,
                use_sliding_window=True,
            ),
            CROSSING,
        ),
        (
            "qwen3_5_moe_text",
            Qwen3_5MoeTextConfig(
                **{one: value for one, value in own.items() if one != "intermediate_size"},
                rope_parameters=rope(partial_rotary_factor=0.5),
                **shared,
                **delta,
                layer_types=["linear_attention", "full_attention"],
                num_experts=4,
                num_experts_per_tok=2,
            ),
            PLAIN,
        ),
        (
            "qwen3_5_text",
            Qwen3_5TextConfig(
                **own | {"head_dim": 16},
                rope_parameters=rope(partial_rotary_factor=0.25),
                **delta,
                layer_types=["linear_attention", "full_attention"],
                tie_word_embeddings=True,
            ),
            PLAIN,
        ),
        (
            "qwen3_next",
            Qwen3NextConfig(
                **own | long | {"num_hidden_layers": 4, "head_dim": 16},
                rope_parameters=rope(partial_rotary_factor=0.25),
                **shared,
                **delta,
                num_experts=4,
                num_experts_per_tok=2,
            ),
            LONG,
        ),
        (
            "qwen3_next_dense",  # heads wider than a panel, a layer without experts
            Qwen3NextConfig(
                **own | {"num_hidden_layers": 2, "head_dim": 8},
                rope_parameters=rope(partial_rotary_factor=0.5),
                **shared,
                **delta | {"linear_num_key_heads": 2, "linear_value_head_dim": 40},
                linear_conv_kernel_dim=3,
                layer_types=["full_attention", "linear_attention"],
                num_experts=4,
                num_experts_per_tok=2,
                mlp_only_layers=[1],
                norm_topk_prob=False,
                attention_bias=True,
            ),
            PLAIN,
        ),
        ("seed_oss", SeedOssConfig(**own, **plain, attention_out_bias=True, mlp_bias=True), PLAIN),
        ("stablelm", StableLmConfig(**sizes, **half, use_qkv_bias=True), PLAIN),
        (
            "stablelm_normed",
            StableLmConfig(**sizes, **half, qk_layernorm=True, use_parallel_residual=True),
            PLAIN,
        ),
        (
            "stablelm_parallel",
            StableLmConfig(**sizes, **half, use_parallel_residual=True, tie_word_embeddings=True),
            PLAIN,
        ),
    ]
