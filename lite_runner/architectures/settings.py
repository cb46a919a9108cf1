"""Settings of a model in a run's config (model.model_config), by MindFormers' config classes.

The defaults stand in conf/; here are types, ranges, and what does not go together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from lite_runner.architectures import from_settings
from lite_runner.architectures.fields import MAX_EXPERTS, MAX_LAYERS
from lite_runner.architectures.spec import Decoder, RopeScaling
from lite_runner.records import Count, Fraction, Index, Penalty, Positive, Range, TopP, dataclass

PREFIX = "model.model_config."
TokenIds = Index | tuple[Index, ...] | None
Error = tuple[tuple[str, ...], str]  # dotted keys, and a sentence about them
# The model of conf/ to start from, by architecture, for an unknown model_name.
FAMILY_MODEL = {
    "LlamaForCausalLM": "llama2_7b",
    "Qwen3ForCausalLM": "qwen3_0.6b",
    "Olmo2ForCausalLM": "olmo2_1b",
    "GraniteForCausalLM": "granite3.1_2b",
    "SmolLM3ForCausalLM": "smollm3_3b",
    "GlmForCausalLM": "glm4_9b_hf",
    "Glm4ForCausalLM": "glm4_9b_0414",
    "ChatGLM2ForConditionalGeneration": "glm2_6b",
    "Gemma2ForCausalLM": "gemma2_2b",
    "Gemma3ForCausalLM": "gemma3_1b",
    "Qwen3MoeForCausalLM": "qwen3_30b_a3b",
    "MixtralForCausalLM": "mixtral_8x7b",
    "Phi3ForCausalLM": "phi4",
    "Starcoder2ForCausalLM": "starcoder2_3b",
    "GPTNeoXForCausalLM": "pythia_160m",
    "BloomLMHeadModel": "bloom_560m",
    "GLMForPreTraining": "glm_6b",
    "GPT2LMHeadModel": "gpt2",
}
# The same by the family names of run_infer_main.py.
FAMILIES = {
    "llama": FAMILY_MODEL["LlamaForCausalLM"],
    "bloom": FAMILY_MODEL["BloomLMHeadModel"],
    "gpt2": FAMILY_MODEL["GPT2LMHeadModel"],
    "glm": FAMILY_MODEL["GLMForPreTraining"],
    "glm2": FAMILY_MODEL["ChatGLM2ForConditionalGeneration"],
    "glm3": "glm3_6b",
}
# Networks of MindFormers by our names.
NETWORK_NAMES = {
    "ParallelLlamaForCausalLM": "LlamaForCausalLM",
    "GLMChatModel": "GLMForPreTraining",
}
# The hidden_act that models of a class are trained with, in MindFormers' words.
HIDDEN_ACTS = {
    "LlamaConfig": ("silu",),
    "Qwen3Config": ("silu", "swiglu"),
    "Olmo2Config": ("silu",),
    "GraniteConfig": ("silu",),
    "SmolLM3Config": ("silu",),
    "GlmConfig": ("silu",),
    "Glm4Config": ("silu",),
    "Gemma2Config": ("gelu_pytorch_tanh", "gelu"),
    "Phi3Config": ("silu",),
    "Gemma3TextConfig": ("gelu_pytorch_tanh", "gelu"),
    "Qwen3MoeConfig": ("silu", "swiglu"),
    "MixtralConfig": ("silu",),
    "BloomConfig": ("gelu",),
    "GPT2Config": ("gelu",),
}
# What a config class of MindFormers takes and never reads, though another reads it.
UNREAD: dict[str, frozenset[str]] = {
    "LlamaConfig": frozenset({"model.model_config.kv_channels"}),
}

if TYPE_CHECKING:
    Network: TypeAlias = str
else:
    Network = Literal.__getitem__((*FAMILY_MODEL, "auto"))


@dataclass(frozen=True, kw_only=True)
class PetSettings:
    """One LoRA adapter that is trained into the checkpoint, as MindFormers' yaml tells of it."""

    pet_type: Literal["lora"]
    lora_rank: Count = 8
    lora_alpha: Positive = 16.0
    target_modules: str | tuple[str, ...]  # a regular expression, or names


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Settings:
    """Settings in `model.model_config` of every model."""

    checkpoint_name_or_path: str  # where the weights are, unless load_checkpoint says
    compute_dtype: Literal["auto", "float32", "float16", "bfloat16"]
    use_past: bool  # keep keys and values between steps
    is_sample_acceleration: bool  # an exported graph chooses the likeliest token itself
    # Each is what the top-level option of its name means while that one is null.
    do_sample: bool
    temperature: Positive
    top_k: Index
    top_p: TopP
    repetition_penalty: Penalty
    max_decode_length: Count | None  # = max_length
    max_new_tokens: Count | None
    pet_config: PetSettings | None = None  # of a MindFormers yaml


@dataclass(frozen=True, kw_only=True)
class AutoSettings(Settings):
    """Settings of model=auto: the sizes are read from the checkpoint."""

    type: Literal["auto"]

    def resolve(self) -> None:
        """The checkpoint has the sizes."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DecoderSettings(Settings):
    """Settings of every model whose sizes are in conf/."""

    seq_length: Count
    hidden_size: Count
    num_layers: Annotated[int, Range(1, MAX_LAYERS)]
    num_heads: Count
    vocab_size: Count
    tie_word_embeddings: bool
    bos_token_id: Index | None
    eos_token_id: TokenIds
    pad_token_id: Index | None

    def resolve(self) -> Decoder:
        """The model that they describe."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return from_settings(given["type"], given | {"eos_token_id": token_ids(self.eos_token_id)})

    def errors(self) -> Iterator[Error]:
        """Settings that do not go together."""
        if self.hidden_size % self.num_heads:
            yield _error(
                f"hidden_size: got {self.hidden_size}, expected a multiple of"
                f" num_heads={self.num_heads}",
                *("hidden_size", "num_heads"),
            )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RotarySettings(DecoderSettings):
    """Settings of models with rotary positions under Llama's names."""

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

    def errors(self) -> Iterator[Error]:
        heads, kv_heads = self.num_heads, self.n_kv_heads or self.num_heads
        if self.head_dim is None:
            yield from super().errors()
        if heads % kv_heads:
            yield _error(
                f"num_heads: got {heads}, expected a multiple of n_kv_heads={kv_heads}",
                *("num_heads", "n_kv_heads"),
            )
        head_dim = self.head_dim or self.hidden_size // heads
        if head_dim % 2 or head_dim == 0:
            yield _error(
                f"head_dim: got {head_dim}, expected an even number: rotary positions turn pairs",
                "head_dim",
            )
        factor = self.partial_rotary_factor
        if factor is not None and (int(head_dim * factor) < 2 or int(head_dim * factor) % 2):
            yield _error(
                f"partial_rotary_factor: got {factor:g}, expected a fraction of the"
                f" {head_dim} of a head that is an even number: rotary positions turn pairs",
                "partial_rotary_factor",
            )
        if self.rope_scaling is not None:
            yield from _rope_errors(self.rope_scaling)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LlamaLikeSettings(RotarySettings):
    """Settings of models built like a Llama, with experts or without."""

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

    def errors(self) -> Iterator[Error]:
        yield from super().errors()
        if not self.use_sliding_window:
            return
        if self.sliding_window is None:
            yield _error(
                "sliding_window: got null, expected a number of tokens with"
                f" {PREFIX}use_sliding_window=true",
                *("use_sliding_window", "sliding_window"),
            )
        kinds, layers = self.layer_types, self.num_layers
        if kinds is not None and len(kinds) != layers:
            yield _error(
                f"layer_types: got {len(kinds)} layers, expected num_layers={layers}",
                *("layer_types", "num_layers"),
            )


@dataclass(frozen=True, kw_only=True)
class LlamaSettings(LlamaLikeSettings):
    """Settings of Llama, Qwen2, Qwen3, Mistral, SmolLM, OLMo 2, Granite, GLM-4, Gemma, Phi-3."""

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


@dataclass(frozen=True, kw_only=True)
class MixtureSettings(LlamaLikeSettings):
    """Settings of Qwen3-MoE and Mixtral; intermediate_size is of layers without experts."""

    type: Literal["Qwen3MoeConfig", "MixtralConfig"]
    num_experts: Annotated[int, Range(1, MAX_EXPERTS)]  # of a layer
    num_experts_per_tok: Count
    norm_topk_prob: bool = True  # a token's probabilities are divided by their sum
    moe_intermediate_size: Count | None = None  # of each expert; null: intermediate_size
    decoder_sparse_step: Count = 1  # each layer of that number has experts
    mlp_only_layers: tuple[Index, ...] | None = None  # layers without experts besides

    def errors(self) -> Iterator[Error]:
        yield from super().errors()
        if self.num_experts_per_tok > self.num_experts:
            yield _error(
                f"num_experts_per_tok: got {self.num_experts_per_tok}, expected at most"
                f" num_experts={self.num_experts}",
                *("num_experts", "num_experts_per_tok"),
            )
        if self.mlp_bias:
            yield _error("mlp_bias: got true, expected false with experts", "mlp_bias")


@dataclass(frozen=True, kw_only=True)
class ChatGLM2Settings(DecoderSettings):
    """Settings of ChatGLM2, ChatGLM3 and GLM-4 in their first form."""

    type: Literal["ChatGLM2Config"]
    kv_channels: Count  # head size
    multi_query_attention: bool  # false: as many key/value heads as heads
    multi_query_group_num: Count  # key/value heads
    ffn_hidden_size: Count
    layernorm_epsilon: Positive
    rope_ratio: Positive  # times 10000: base of the rotary frequencies
    qkv_has_bias: bool
    add_bias_linear: bool = False  # all linear layers but the head have a bias
    rmsnorm: bool = True  # false: LayerNorm
    post_layer_norm: bool = True  # whether there is a norm before the head

    def errors(self) -> Iterator[Error]:
        heads, groups = self.num_heads, self.multi_query_group_num
        if self.multi_query_attention and (heads % groups or heads == groups):
            yield _error(
                f"multi_query_group_num: got {groups}, expected a divisor of num_heads={heads},"
                " and fewer; multi_query_attention=false has as many",
                *("num_heads", "multi_query_group_num"),
            )
        if self.kv_channels % 4:
            yield _error(
                f"kv_channels: got {self.kv_channels}, expected a multiple of 4: half of a head is"
                " rotated",
                "kv_channels",
            )


@dataclass(frozen=True, kw_only=True)
class LayerNormSettings(DecoderSettings):
    """Settings of BLOOM and GPT-2, which have the same shape."""

    type: Literal["BloomConfig", "GPT2Config"]
    expand_ratio: Count  # feed-forward width / hidden_size
    layernorm_epsilon: Positive


@dataclass(frozen=True, kw_only=True)
class RotaryLayerNormSettings(RotarySettings):
    """Settings of StarCoder2 and GPT-NeoX."""

    type: Literal["Starcoder2Config", "GPTNeoXConfig"]
    layernorm_epsilon: Positive
    activation: Literal["gelu", "gelu_exact"]  # gelu: the tanh form
    use_parallel_residual: bool = False  # attention and feed-forward take the same input


@dataclass(frozen=True, kw_only=True)
class GLMSettings(DecoderSettings):
    """Settings of ChatGLM-6B."""

    type: Literal["GLMConfig"]
    bos_token_id: Index  # sop, which ends a prompt's prefix
    inner_hidden_size: Count  # feed-forward width
    layernorm_epsilon: Positive
    gmask_token_id: Index  # stands for the text that is generated
    mask_token_id: Index  # the same in a prompt without the other

    def errors(self) -> Iterator[Error]:
        yield from super().errors()
        if (head_dim := self.hidden_size // self.num_heads) % 4:
            yield _error(
                f"num_heads: got {self.num_heads}, expected heads of a multiple of 4, not of"
                f" {head_dim}: each half of them turns pairs",
                *("hidden_size", "num_heads"),
            )


def token_ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """One id, several or none as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


ModelSettings = (
    LlamaSettings
    | MixtureSettings
    | ChatGLM2Settings
    | LayerNormSettings
    | RotaryLayerNormSettings
    | GLMSettings
    | AutoSettings
)


def _rope_errors(rope: RopeScaling) -> Iterator[Error]:
    key = "rope_scaling"
    if rope.factor < 1:
        yield _error(f"{key}.factor: got {rope.factor:g}, expected >= 1", key)
    if rope.original_seq_length < 1:
        yield _error(
            f"{key}.original_seq_length: got {rope.original_seq_length}, expected >= 1", key
        )
    if rope.type == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        yield _error(
            f"{key}: got low_freq_factor={rope.low_freq_factor:g} and"
            f" high_freq_factor={rope.high_freq_factor:g}, expected 0 < low < high",
            key,
        )
    if rope.type == "yarn" and not 0 < rope.beta_slow < rope.beta_fast:
        yield _error(
            f"{key}: got beta_slow={rope.beta_slow:g} and beta_fast={rope.beta_fast:g},"
            " expected 0 < slow < fast",
            key,
        )


def _error(text: str, *names: str) -> Error:
    return tuple(f"{PREFIX}{name}" for name in names), f"{PREFIX}{text}"
