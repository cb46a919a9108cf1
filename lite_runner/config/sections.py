"""The sections of a run's config. Names are those of run_mindformer's yaml.

The defaults stand in conf/; here are only types, choices and ranges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from lite_runner.architectures import from_settings
from lite_runner.architectures.fields import MAX_EXPERTS, MAX_LAYERS
from lite_runner.architectures.spec import Decoder, RopeScaling
from lite_runner.config import hccl
from lite_runner.config.fields import Range
from lite_runner.config.ranges import Count, Fraction, Index, Positive, TopP
from lite_runner.records import dataclass

CheckpointFormat = Literal["ckpt", "safetensors", "huggingface"]
AdapterFormat = Literal["peft", "mindformers"]
TokenIds = Index | tuple[Index, ...] | None


@dataclass(frozen=True, kw_only=True)
class PetSettings:
    """One LoRA adapter that is trained into the checkpoint, as MindFormers' yaml tells of it."""

    pet_type: Literal["lora"]
    lora_rank: Count = 8
    lora_alpha: Positive = 16.0
    target_modules: str | tuple[str, ...]  # a regular expression, or names


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Settings:
    """What `model.model_config` holds whatever the model."""

    checkpoint_name_or_path: str  # where the weights are, unless load_checkpoint says
    compute_dtype: Literal["auto", "float32", "float16", "bfloat16"]
    use_past: bool  # keep keys and values between steps
    is_sample_acceleration: bool  # an exported graph chooses the likeliest token itself
    # Each is what the top-level option of its name means while that one is null.
    do_sample: bool
    temperature: Positive
    top_k: Index
    top_p: TopP
    repetition_penalty: Positive
    max_decode_length: Count | None  # = max_length
    max_new_tokens: Count | None
    pet_config: PetSettings | None = None  # of a MindFormers yaml


@dataclass(frozen=True, kw_only=True)
class AutoSettings(Settings):
    """Of model=auto: the sizes are read from the checkpoint."""

    type: Literal["auto"]

    def resolve(self) -> None:
        """The checkpoint has the sizes."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DecoderSettings(Settings):
    """Of every model whose sizes are in conf/."""

    seq_length: Count
    hidden_size: Count
    num_layers: Annotated[int, Range(1, MAX_LAYERS)]
    num_heads: Count
    vocab_size: Count
    tie_word_embeddings: bool
    bos_token_id: Index | None
    eos_token_id: TokenIds
    pad_token_id: Index | None

    def _described(self, kind: str) -> Decoder:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return from_settings(kind, given | {"eos_token_id": token_ids(self.eos_token_id)})


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RotarySettings(DecoderSettings):
    """Of what has rotary positions under Llama's names."""

    n_kv_heads: Count | None  # null: as num_heads
    head_dim: Count | None  # null: hidden_size / num_heads
    intermediate_size: Count
    theta: Positive
    rope_scaling: RopeScaling | None
    partial_rotary_factor: Fraction | None = None  # of a head; null: all of it
    qkv_has_bias: bool
    attn_proj_has_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Count | None = None  # latest tokens that one sees, itself among them


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LlamaLikeSettings(RotarySettings):
    """Of what is built like a Llama, with experts or without."""

    rms_norm_eps: Positive
    use_sliding_window: bool = False  # else sliding_window and the next three have no effect
    max_window_layers: Index = 0  # first layers, which have no window
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window_pattern: Count | None = None  # every so manieth layer has no window
    no_rope_layers: tuple[Literal[0, 1], ...] | None = None  # 1: with rotary positions; null: all
    embedding_multiplier: Positive = 1.0
    attention_multiplier: Positive | None = None  # of scores; null: head_dim^-1/2
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0  # logits are divided by it
    attn_logit_softcapping: Positive | None = None  # of scores, with tanh; null: none
    final_logit_softcapping: Positive | None = None  # of logits
    rope_local_base_freq: Positive | None = None  # theta of layers with windows; null: 10000


@dataclass(frozen=True, kw_only=True)
class LlamaSettings(LlamaLikeSettings):
    """Of Llama, Qwen2, Qwen3, Mistral, SmolLM2 and 3, OLMo 2, Granite, GLM-4, Gemma 2 and 3,
    Phi-3."""

    type: Literal[
        "LlamaConfig",
        "Qwen3Config",
        "Olmo2Config",
        "GraniteConfig",
        "SmolLM3Config",
        "GlmConfig",
        "Glm4Config",
        "Gemma2Config",
        "Gemma3TextConfig",
        "Phi3Config",
    ]

    def resolve(self) -> Decoder:
        return self._described(self.type)


@dataclass(frozen=True, kw_only=True)
class MixtureSettings(LlamaLikeSettings):
    """Of Qwen3-MoE and Mixtral; intermediate_size is of layers without experts."""

    type: Literal["Qwen3MoeConfig", "MixtralConfig"]
    num_experts: Annotated[int, Range(1, MAX_EXPERTS)]  # of a layer
    num_experts_per_tok: Count
    norm_topk_prob: bool = True  # a token's probabilities are divided by their sum
    moe_intermediate_size: Count | None = None  # of each expert; null: intermediate_size
    decoder_sparse_step: Count = 1  # each layer of that number has experts
    mlp_only_layers: tuple[Index, ...] | None = None  # layers without experts besides

    def resolve(self) -> Decoder:
        return self._described(self.type)


@dataclass(frozen=True, kw_only=True)
class ChatGLM2Settings(DecoderSettings):
    """Of ChatGLM2, ChatGLM3 and GLM-4 in their first form."""

    type: Literal["ChatGLM2Config"]
    kv_channels: Count  # head size
    multi_query_attention: bool  # false: as many key/value heads as heads
    multi_query_group_num: Count  # key/value heads
    ffn_hidden_size: Count
    layernorm_epsilon: Positive
    rope_ratio: Positive  # times 10000: base of the rotary frequencies
    qkv_has_bias: bool

    def resolve(self) -> Decoder:
        return self._described(self.type)


@dataclass(frozen=True, kw_only=True)
class LayerNormSettings(DecoderSettings):
    """Of bloom and gpt2, which have the same shape."""

    type: Literal["BloomConfig", "GPT2Config"]
    expand_ratio: Count  # feed-forward width / hidden_size
    layernorm_epsilon: Positive

    def resolve(self) -> Decoder:
        return self._described(self.type)


@dataclass(frozen=True, kw_only=True)
class RotaryLayerNormSettings(RotarySettings):
    """Of StarCoder2 and GPT-NeoX."""

    type: Literal["Starcoder2Config", "GPTNeoXConfig"]
    layernorm_epsilon: Positive
    activation: Literal["gelu", "gelu_exact"]  # gelu: the tanh form
    use_parallel_residual: bool = False  # attention and feed-forward take the same input

    def resolve(self) -> Decoder:
        return self._described(self.type)


@dataclass(frozen=True, kw_only=True)
class GLMSettings(DecoderSettings):
    """Of ChatGLM-6B."""

    type: Literal["GLMConfig"]
    bos_token_id: Index  # sop, which ends a prompt's prefix
    inner_hidden_size: Count  # feed-forward width
    layernorm_epsilon: Positive
    gmask_token_id: Index  # stands for the text that is generated
    mask_token_id: Index  # the same in a prompt without the other

    def resolve(self) -> Decoder:
        return self._described(self.type)


def token_ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """One id, several or none as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


@dataclass(frozen=True)
class Arch:
    type: Literal[
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "Olmo2ForCausalLM",
        "GraniteForCausalLM",
        "SmolLM3ForCausalLM",
        "GlmForCausalLM",
        "Glm4ForCausalLM",
        "ChatGLM2ForConditionalGeneration",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
        "Phi3ForCausalLM",
        "Starcoder2ForCausalLM",
        "GPTNeoXForCausalLM",
        "BloomLMHeadModel",
        "GLMForPreTraining",
        "GPT2LMHeadModel",
        "auto",
    ]


@dataclass(frozen=True)
class Model:
    arch: Arch
    model_config: (
        LlamaSettings
        | MixtureSettings
        | ChatGLM2Settings
        | LayerNormSettings
        | RotaryLayerNormSettings
        | GLMSettings
        | AutoSettings
    )


@dataclass(frozen=True)
class Trainer:
    type: Literal["CausalLanguageModelingTrainer"]
    model_name: str  # names the output folder


@dataclass(frozen=True)
class TokenizerSettings:
    # Only ByteTokenizer changes anything: the others are read from the tokenizer's own file.
    type: Literal[
        "AutoTokenizer",
        "BloomTokenizer",
        "BloomTokenizerFast",
        "ByteTokenizer",
        "ChatGLM2Tokenizer",
        "ChatGLM3Tokenizer",
        "ChatGLMTokenizer",
        "GPT2Tokenizer",
        "GPT2TokenizerFast",
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "Qwen2Tokenizer",
        "Qwen2TokenizerFast",
    ]
    tokenizer_file: str | None  # null: beside the checkpoint


@dataclass(frozen=True)
class Processor:
    tokenizer: TokenizerSettings


@dataclass(frozen=True)
class Context:
    mode: Literal[0, 1]  # 0 graph, 1 pynative
    device_target: Literal["auto", "CPU", "Ascend"]
    device_id: Index
    threads: Annotated[int, Range(1, 4096)] | None  # null: one a processor
    kernels: bool
    max_device_memory: str | None  # Ascend: 58GB; null: all of it
    ascend_config: Mapping[str, Any] | None  # Ascend: as mindspore.set_context takes it
    cache_limit: str | None  # 10GB; null: none


@dataclass(frozen=True)
class Parallel:
    parallel_mode: Annotated[int, Range(0, 3)]
    strategy_ckpt_save_file: str
    worker_num: Count | None  # null: as many as parallel_config multiplies to
    local_worker_num: Count | None  # null: all of them are on this machine
    master_addr: str
    master_port: Annotated[int, Range(1024, 65535)] | None  # null: a free one
    node_rank: Index
    rank_table_file: str | None  # "": none; null: that of RANK_TABLE_FILE
    log_dir: str  # of msrun, its scheduler and the ranks; "": msrun/ in the run folder
    rendezvous_timeout: Count  # seconds
    hccl_timeout: Annotated[int, Range(hccl.LEAST_S, hccl.MOST_S)]  # seconds
    timeout: Count | None  # seconds; null: none


@dataclass(frozen=True)
class ParallelConfig:
    data_parallel: Count
    model_parallel: Count
    pipeline_stage: Count
    vocab_emb_dp: bool  # true: the embedding and the head are whole on every rank


@dataclass(frozen=True)
class Export:
    layout: Literal["auto", "resizable", "dynamic", "static_pair", "packed"]
    target: Literal["auto", "CPU", "Ascend"]
    weight_fp16: bool


@dataclass(frozen=True)
class Infer:
    model_dir: str  # "": the one in the cache
    prefill_model_path: str
    increment_model_path: str
    infer_seq_length: Count | None
    model_type: Literal["mindir", "mindir_lite"] | None
    enc_key: str  # "": not encrypted
    rank_id: Index  # of this process among those that share the model
    ge_config_path: str | tuple[str, ...]  # one file, or [prefill, increment]
    ge_preset: Literal["auto"] | None  # auto: those of the machine's processor come first
    ge_options: Mapping[str, Any] | None  # section -> options, whose dots are nesting


@dataclass(frozen=True)
class RunMindFormers:
    release: Literal["1.0.2", "1.9.0"] | None  # null: the first that computes the model


@dataclass(frozen=True)
class MindFormers:
    release: str | float | None  # null: what is written is for every release
