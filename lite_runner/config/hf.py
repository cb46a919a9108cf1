"""Hugging Face's config.json, of transformers 4 and 5, to and from ModelConfig."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lite_runner.config.hf_fields import Fields
from lite_runner.config.hf_rope import rope_from_hf, rope_scaling_to_hf
from lite_runner.config.model import ModelConfig
from lite_runner.errors import ArtifactError, ConfigError

MAX_LAYERS = 4096
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # names of one function
SILU = ("silu", "swish")


def model_config_from_hf(raw: dict[str, Any], where: str) -> ModelConfig:
    """The model that config.json describes.

    `where` names the file in errors. Raises ArtifactError for a value of the wrong type or range,
    and for every variant of a family that the networks do not compute.
    """
    fields = Fields(raw, where)
    model_type = raw.get("model_type")
    reader = READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise fields.fault("model_type", model_type, f"one of {', '.join(READERS)}")
    if raw.get("quantization_config") is not None:
        raise ArtifactError(
            f"{where}: the weights are quantized (quantization_config), which is not supported",
            "take the unquantized checkpoint, or a GGUF file",
        )
    return reader(fields)


def special_tokens_from_hf(raw: dict[str, Any], where: str, vocab_size: int) -> dict[str, Any]:
    """bos_token_id, eos_token_id (a tuple) and pad_token_id of a config.json or its like."""
    return Fields(raw, where).tokens(vocab_size)


def _bloom(fields: Fields) -> ModelConfig:
    fields.refuse("apply_residual_connection_post_layernorm", default=False, supported=False)
    if fields.integer("pretraining_tp", default=1) > 1:
        # It sums slices of two projections, and leaves their biases out.
        fields.refuse("slow_but_exact", default=False, supported=False)
    hidden = fields.integer("n_embed", "hidden_size")
    wide = fields.integer("n_inner", default=4 * hidden)
    if wide != 4 * hidden:
        raise fields.fault("n_inner", wide, f"4 * hidden_size = {4 * hidden}")
    return _classic(fields, "bloom", hidden, wide, fields.integer("seq_length", default=2048))


def _gpt2(fields: Fields) -> ModelConfig:
    fields.refuse("scale_attn_weights", default=True, supported=True)
    fields.refuse("scale_attn_by_inverse_layer_idx", default=False, supported=False)
    fields.refuse("add_cross_attention", default=False, supported=False)
    fields.choice("activation_function", TANH_GELU)
    hidden = fields.integer("hidden_size", "n_embd")
    return _classic(
        fields,
        "gpt2",
        hidden,
        fields.integer("n_inner", default=4 * hidden),
        fields.integer("max_position_embeddings", "n_positions", "n_ctx", default=1024),
    )


def _classic(fields: Fields, family: Any, hidden: int, wide: int, seq_length: int) -> ModelConfig:
    """What bloom and gpt2 have in common: whole heads, layer norms, a tied output.

    Where a size stands under two names, the one that transformers takes comes first.
    """
    fields.refuse("tie_word_embeddings", default=True, supported=True)
    heads = fields.integer("num_attention_heads", "n_head")
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers", "n_layer", most=MAX_LAYERS),
        num_heads=heads,
        n_kv_heads=heads,
        head_dim=_head_dim(fields, hidden, heads),
        intermediate_size=wide,
        seq_length=seq_length,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=True,
        **fields.tokens(vocab_size),
    )


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise fields.fault("hidden_size", hidden, f"a multiple of the {heads} heads")
    return hidden // heads


def _llama(fields: Fields, qwen2: bool = False) -> ModelConfig:
    fields.choice("hidden_act", SILU)
    fields.refuse("attention_bias", default=False, supported=False)
    fields.refuse("mlp_bias", default=False, supported=False)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.fault("num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
    if fields.raw.get("head_dim") is None:
        head_dim = _head_dim(fields, hidden, heads)
    else:
        head_dim = fields.integer("head_dim")
    if head_dim % 2:
        raise fields.fault("head_dim", head_dim, "an even number, for the rotary embedding")
    layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    positions = fields.integer("max_position_embeddings", default=32768 if qwen2 else 2048)
    if qwen2:
        _refuse_sliding_window(fields, layers, positions)
    theta, scaling = rope_from_hf(fields, positions)
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        # Dynamic scaling starts where the trained positions end, so there the context goes on.
        seq_length=int(positions * scaling.factor)
        if scaling is not None and scaling.type == "dynamic"
        else positions,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        theta=theta,
        rope_scaling=scaling,
        qkv_has_bias=qwen2,
        **fields.tokens(vocab_size),
    )


def _refuse_sliding_window(fields: Fields, layers: int, positions: int) -> None:
    if not fields.flag("use_sliding_window", False):
        return
    window = fields.integer("sliding_window", default=4096)
    kinds = fields.raw.get("layer_types")
    if isinstance(kinds, list):
        slides = "sliding_attention" in kinds
    else:
        first = fields.raw.get("max_window_layers", 28)
        if type(first) is not int:
            raise fields.fault("max_window_layers", first, "an integer")
        slides = first < layers
    if slides and window < positions:
        raise ArtifactError(
            f"{fields.where}: sliding-window attention over {window} of {positions} positions "
            "(use_sliding_window=true) is not supported",
            f"max_position_embeddings of at most {window} would not need the window",
        )


FAMILIES = ("bloom", "llama", "gpt2")  # that Hugging Face has; others are registered


def hf_from_model_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`, in words that transformers 4 and 5 both read.

    ConfigError for a family that transformers does not have.
    """
    if config.family not in FAMILIES:
        raise ConfigError(
            f"{config.family}: a registered family, which Hugging Face's format does not know",
            "convert_format=ckpt or convert_format=safetensors",
        )
    eos = config.eos_token_id
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": config.pad_token_id,
    }
    if config.family == "bloom":
        return common | {
            "model_type": "bloom",
            "architectures": ["BloomForCausalLM"],
            "hidden_size": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "layer_norm_epsilon": config.norm_eps,
            "seq_length": config.seq_length,
        }
    if config.family == "gpt2":
        return common | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.intermediate_size,
            "n_positions": config.seq_length,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
        }
    scaling = config.rope_scaling
    dynamic = scaling is not None and scaling.type == "dynamic"
    return common | {
        "model_type": "qwen2" if config.qkv_has_bias else "llama",
        "architectures": ["Qwen2ForCausalLM" if config.qkv_has_bias else "LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": scaling.original_seq_length
        if scaling is not None and dynamic
        else config.seq_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.theta,
        "rope_scaling": None if scaling is None else rope_scaling_to_hf(scaling),
    }


# By model_type of config.json; lite_runner.register adds to it.
READERS: dict[str, Callable[[Fields], ModelConfig]] = {
    "bloom": _bloom,
    "llama": _llama,
    "qwen2": partial(_llama, qwen2=True),
    "gpt2": _gpt2,
}
