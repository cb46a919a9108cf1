"""The tiny models that make_reference.py makes; tests/fixtures/README.md says what each is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from newer_cases import newer_cases
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)


@dataclass(frozen=True)
class Case:
    """A tiny model and the prompt lengths it is asked."""

    name: str
    config: PreTrainedConfig
    lengths: tuple[int, ...] = (1, 5, 17, 40)
    old_names: bool = False  # files as the first repositories of the hub have them
    chatglm: bool = False  # a glm, stored as ChatGLM's own repositories store it

    @property
    def is_dynamic(self) -> bool:
        rope = getattr(self.config, "rope_parameters", None) or {}
        return rope.get("rope_type") in ("dynamic", "longrope")


def llama(**changes: Any) -> LlamaConfig:
    """A llama with grouped heads, a head size of its own and an untied head."""
    rope = changes.pop("rope", {"rope_type": "default"})
    values: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0} | rope,
    }
    return LlamaConfig(**(values | changes))


def yarn(**extra: Any) -> LlamaConfig:
    """YaRN from 16 to 64 positions; these rotations give a ramp over several frequencies."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    return llama(rope=rope | {"rope_theta": 100.0, "beta_fast": 2.0, "beta_slow": 0.25} | extra)


def cases() -> list[Case]:
    bloom = {"vocab_size": 96, "n_layer": 2, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = {"vocab_size": 96, "n_positions": 48, "n_embd": 28, "n_layer": 2, "n_head": 4}
    gpt2 |= {"bos_token_id": 0, "eos_token_id": 0}
    linear = {"rope_type": "linear", "factor": 4.0}
    # The last length but one crosses 16 positions while decoding.
    dynamic = {"rope_type": "dynamic", "factor": 3.0}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    default_yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    # Whole groups of 32 columns, also of each of two ranks, and rows of 256, as Q4_K wants them.
    groups = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2}
    groups |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    groups |= {"intermediate_size": 64, "rms_norm_eps": 1e-5}
    half = {"max_position_embeddings": 64, "bos_token_id": None, "pad_token_id": None}
    half |= {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
    odd = {"vocab_size": 97, "hidden_size": 20, "intermediate_size": 44, "num_hidden_layers": 3}
    odd |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12, "eos_token_id": 2}
    return [
        Case("bloom", BloomConfig(**bloom, hidden_size=32, n_head=4)),
        Case("bloom_6_heads", BloomConfig(**bloom, hidden_size=24, n_head=6), old_names=True),
        Case("gpt2", GPT2Config(**gpt2), old_names=True),
        Case("gpt2_inner", GPT2Config(**gpt2, n_inner=40)),
        Case("llama", llama()),
        Case(
            "llama_tied_mha",
            llama(num_key_value_heads=4, head_dim=None, tie_word_embeddings=True),
            old_names=True,
        ),
        Case("llama_rope_linear", llama(rope=linear), old_names=True),
        Case(
            "llama_rope_dynamic",
            llama(rope=dynamic, max_position_embeddings=16),
            lengths=(1, 16, 12, 33),
        ),
        Case("llama_rope_llama3", llama(rope=llama3), old_names=True),
        Case("llama_rope_yarn", llama(rope=default_yarn)),
        Case("llama_rope_yarn_mscale", yarn(mscale=1.0, mscale_all_dim=0.5, truncate=False)),
        Case("llama_rope_yarn_attention_factor", yarn(attention_factor=0.7), old_names=True),
        Case(
            "qwen2",
            Qwen2Config(
                vocab_size=96,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
                eos_token_id=2,
            ),
        ),
        Case(
            "qwen2_window",
            Qwen2Config(
                vocab_size=96,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                use_sliding_window=True,
                sliding_window=8,
                max_window_layers=1,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
                eos_token_id=2,
            ),
            lengths=(1, 8, 12, 33),
            old_names=True,
        ),
        Case("llama_biases", llama(intermediate_size=64, attention_bias=True, mlp_bias=True)),
        Case(
            "qwen3",
            Qwen3Config(
                **groups | {"num_attention_heads": 8, "head_dim": 32, "intermediate_size": 128},
                max_position_embeddings=64,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            ),
        ),
        Case(
            "qwen3_tied",
            Qwen3Config(
                vocab_size=97,
                hidden_size=20,
                intermediate_size=44,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=10,
                max_position_embeddings=48,
                attention_bias=True,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                eos_token_id=2,
            ),
            old_names=True,
        ),
        Case(
            "mistral",
            MistralConfig(
                **groups | {"intermediate_size": 256},
                max_position_embeddings=64,
                sliding_window=8,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            lengths=(1, 8, 12, 33),
        ),
        Case(
            "mistral_long",
            MistralConfig(
                **groups | {"head_dim": None},
                max_position_embeddings=512,
                sliding_window=140,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            lengths=(7, 128, 137, 300),
            old_names=True,
        ),
        Case(
            "olmo2",
            Olmo2Config(
                **groups,
                pad_token_id=None,
                max_position_embeddings=64,
                rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            ),
        ),
        Case(
            "olmo2_tied",
            Olmo2Config(
                vocab_size=97,
                hidden_size=30,
                intermediate_size=44,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_key_value_heads=3,
                max_position_embeddings=48,
                attention_bias=True,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                pad_token_id=None,
                eos_token_id=2,
            ),
            old_names=True,
        ),
        Case(
            "granite",
            GraniteConfig(
                **groups,
                **{"embedding_multiplier": 12.0, "attention_multiplier": 0.1},
                **{"residual_multiplier": 0.22, "logits_scaling": 7.0},
                max_position_embeddings=64,
                bos_token_id=None,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
        ),
        Case(
            "granite_biases",
            GraniteConfig(
                vocab_size=97,
                hidden_size=20,
                intermediate_size=44,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=10,
                embedding_multiplier=0.5,
                attention_multiplier=0.3,
                residual_multiplier=1.5,
                max_position_embeddings=48,
                attention_bias=True,
                mlp_bias=True,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                bos_token_id=None,
                eos_token_id=2,
            ),
            old_names=True,
        ),
        Case(
            "smollm3",
            SmolLM3Config(
                **groups
                | {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1},
                max_position_embeddings=64,
                bos_token_id=None,
                pad_token_id=None,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
        ),
        Case(
            "smollm3_window",
            SmolLM3Config(
                vocab_size=97,
                hidden_size=20,
                intermediate_size=44,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=10,
                max_position_embeddings=64,
                use_sliding_window=True,
                sliding_window=8,
                no_rope_layers=[0, 1, 0],
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                bos_token_id=None,
                pad_token_id=None,
                eos_token_id=2,
            ),
            lengths=(1, 8, 12, 33),
            old_names=True,
        ),
        Case("glm", GlmConfig(**groups, **half)),
        Case(
            "glm4",
            Glm4Config(**groups, **half | {"attention_bias": False, "tie_word_embeddings": True}),
        ),
        Case("glm4_biases", Glm4Config(**odd, **half), old_names=True),
        Case("chatglm", GlmConfig(**groups, **half), chatglm=True),
        Case(
            "chatglm_by_head",
            GlmConfig(**odd | {"num_key_value_heads": 3}, **half, rms_norm_eps=1e-5),
            chatglm=True,
        ),
        Case(
            "gemma2",
            Gemma2Config(
                **groups,
                max_position_embeddings=64,
                query_pre_attn_scalar=16,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=20.0,
                sliding_window=8,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            lengths=(1, 8, 12, 33),
        ),
        Case(
            "gemma2_biases",
            Gemma2Config(
                vocab_size=97,
                hidden_size=21,
                intermediate_size=44,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=10,
                max_position_embeddings=48,
                attention_bias=True,
                query_pre_attn_scalar=9,
                attn_logit_softcapping=None,
                final_logit_softcapping=None,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                eos_token_id=2,
            ),
            old_names=True,
        ),
        Case(
            "gemma3",
            Gemma3TextConfig(
                **groups | {"num_hidden_layers": 3},
                max_position_embeddings=64,
                query_pre_attn_scalar=16,
                sliding_window=8,
                sliding_window_pattern=3,
                final_logit_softcapping=25.0,
                rope_parameters={
                    "full_attention": {
                        "rope_type": "linear",
                        "factor": 4.0,
                        "rope_theta": 1000000.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            ),
            lengths=(1, 8, 12, 33),
        ),
        Case(
            "gemma3_biases",
            Gemma3TextConfig(
                vocab_size=97,
                hidden_size=21,
                intermediate_size=44,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=10,
                max_position_embeddings=48,
                query_pre_attn_scalar=20,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
                sliding_window=12,
                attention_bias=True,
                tie_word_embeddings=False,
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
                eos_token_id=2,
            ),
            old_names=True,
        ),
        Case(
            "qwen3_moe",
            Qwen3MoeConfig(
                **groups,
                **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
                norm_topk_prob=True,
                max_position_embeddings=64,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
        ),
        Case(
            "qwen3_moe_step",
            Qwen3MoeConfig(
                vocab_size=97,
                hidden_size=20,
                intermediate_size=44,
                num_hidden_layers=4,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=10,
                num_experts=7,
                num_experts_per_tok=3,
                moe_intermediate_size=33,
                decoder_sparse_step=2,
                mlp_only_layers=[3],
                attention_bias=True,
                tie_word_embeddings=True,
                max_position_embeddings=48,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                eos_token_id=2,
            ),
            old_names=True,
        ),
        Case(
            "mixtral",
            MixtralConfig(
                **groups | {"intermediate_size": 32},
                **{"num_local_experts": 5, "num_experts_per_tok": 3},
                sliding_window=8,
                max_position_embeddings=64,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            lengths=(1, 8, 12, 33),
        ),
        Case(
            "starcoder2",
            Starcoder2Config(
                vocab_size=96,
                hidden_size=32,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=1,
                sliding_window=8,
                max_position_embeddings=64,
                **{"bos_token_id": None, "eos_token_id": 2},
                rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            ),
            lengths=(1, 8, 12, 33),
        ),
        Case(
            "starcoder2_exact",
            Starcoder2Config(
                vocab_size=96,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                **{"use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": False},
                max_position_embeddings=64,
                **{"bos_token_id": None, "eos_token_id": 2},
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
        ),
        Case(
            "gpt_neox",
            GPTNeoXConfig(
                vocab_size=96,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=3,
                num_attention_heads=2,
                max_position_embeddings=64,
                **{"bos_token_id": None, "eos_token_id": 2},
            ),
        ),
        Case(
            "gpt_neox_serial",
            GPTNeoXConfig(
                vocab_size=97,
                hidden_size=36,
                intermediate_size=56,
                num_hidden_layers=2,
                num_attention_heads=3,
                max_position_embeddings=64,
                **{"use_parallel_residual": False, "attention_bias": False},
                **{"hidden_act": "gelu_fast", "tie_word_embeddings": True},
                **{"bos_token_id": None, "eos_token_id": 2},
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 5000.0,
                    "partial_rotary_factor": 1.0,
                },
            ),
        ),
        Case(
            "phi3",
            Phi3Config(
                **{key: value for key, value in groups.items() if key != "head_dim"},
                **{"bos_token_id": None, "pad_token_id": None, "sliding_window": 8},
                max_position_embeddings=64,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
            lengths=(1, 8, 12, 33),
        ),
        Case(
            "phi3_partial",
            Phi3Config(
                vocab_size=97,
                hidden_size=36,
                intermediate_size=44,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_key_value_heads=1,
                max_position_embeddings=48,
                tie_word_embeddings=True,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                },
                **{"bos_token_id": None, "pad_token_id": None},
                eos_token_id=2,
            ),
        ),
        # Prompts that stay short, become long, and are long at once.
        Case(
            "phi3_long",
            Phi3Config(
                **{key: value for key, value in groups.items() if key != "head_dim"},
                **{"bos_token_id": None, "pad_token_id": None},
                max_position_embeddings=64,
                original_max_position_embeddings=16,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0, 1.1, 1.7, 2.5],
                    "long_factor": [1.1, 2.0, 4.0, 7.5],
                },
            ),
            lengths=(1, 13, 16, 40),
            old_names=True,
        ),
        Case(
            "phi3_longrope",
            Phi3Config(
                vocab_size=97,
                hidden_size=48,
                intermediate_size=44,
                num_hidden_layers=3,
                num_attention_heads=3,
                num_key_value_heads=1,
                max_position_embeddings=48,
                original_max_position_embeddings=12,
                tie_word_embeddings=True,
                sliding_window=9,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.75,
                    "attention_factor": 1.3,
                    "short_factor": [1.0, 0.9, 1.2, 1.5, 1.6, 2.2],
                    "long_factor": [1.0, 2.0, 3.5, 5.0, 6.0, 8.5],
                },
                **{"bos_token_id": None, "pad_token_id": None},
                eos_token_id=2,
            ),
            lengths=(3, 9, 12, 20),
        ),
        *(Case(*one) for one in newer_cases()),
    ]
