"""Gemma 2: a Llama with norms before and behind attention and feed-forward, GELU, scaled
embeddings, soft caps of scores and logits, and a window in every other layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import GGUF, MindFormers, llama, llama_like
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder

_LAYER = "model.layers.{}"
NAMES: Names = {
    **llama_like.NAMES,
    "attention_post_norm": Name(
        f"{_LAYER}.post_attention_norm", f"{_LAYER}.post_attention_layernorm"
    ),
    "feed_forward_norm": Name(f"{_LAYER}.ffn_norm", f"{_LAYER}.pre_feedforward_layernorm"),
    "feed_forward_post_norm": Name(
        f"{_LAYER}.post_ffn_norm", f"{_LAYER}.post_feedforward_layernorm"
    ),
}
# gelu_new is another name of the same function.
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new")
KEYS = llama_like.KEYS | {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "sliding_window": "attention.sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
}


def decoder(*, hidden_size: int, **rest: Any) -> Decoder:
    return llama_like.decoder(
        norms="both",
        activation="gelu",
        hidden_size=hidden_size,
        embedding_scale=hidden_size**0.5,
        **rest,
    )


def sizes(fields: Fields, *, period: int, rope: Fields | None = None) -> dict[str, Any]:
    """The fields of config.json that Gemma 2 and 3 share, as `decoder` takes them; without
    layer_types each layer has a window but every `period`th."""
    fields = fields.with_defaults(
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        tie_word_embeddings=True,
        sliding_window=4096,
        **{"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
    )
    fields.neutral(use_bidirectional_attention=False)
    fields.choice("hidden_activation", ACTIVATIONS)
    # Published files also have hidden_act, which transformers does not read.
    shared = llama_like.sizes(fields.with_values(hidden_act=None), positions=1, rope=rope)
    bias = fields.flag("attention_bias", False)
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    return shared | {
        "qkv_bias": bias,
        "out_bias": bias,
        "scale": None if scalar == shared["head_dim"] else scalar**-0.5,
        "windows": llama.read_periodic_windows(fields, shared["num_layers"], period),
        "logits_softcap": fields.optional_number("final_logit_softcapping"),
    }


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        vocab_size=256000,
        max_position_embeddings=8192,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    return decoder(
        architecture="gemma2",
        softcap=fields.optional_number("attn_logit_softcapping"),
        **sizes(fields, period=2),
    )


def shared(model: Decoder) -> dict[str, Any]:
    """The part of config.json that Gemma 2 and 3 share."""
    scale, slides = model.attention.scale, [window is not None for window in model.windows]
    scalar = float(model.head_dim) if scale is None else scale**-2
    nearest = round(scalar)
    return llama_like.shared(model) | {
        "hidden_act": ACTIVATIONS[0],
        "hidden_activation": ACTIVATIONS[0],
        "attention_bias": model.attention.qkv_bias,
        "query_pre_attn_scalar": nearest if abs(scalar - nearest) < 1e-6 else scalar,
        "sliding_window": max((window or 0 for window in model.windows), default=0) or 4096,
        "layer_types": [llama.SLIDING if one else llama.FULL for one in slides],
        "attn_logit_softcapping": model.attention.softcap,
        "final_logit_softcapping": model.logits_softcap,
    }


def write(model: Decoder) -> dict[str, Any]:
    return shared(model) | {"architectures": ["Gemma2ForCausalLM"]}


def settings(model: Decoder) -> dict[str, Any]:
    """MindFormers settings besides the shared ones; embeddings are always scaled by
    hidden_size^1/2."""
    found = llama.settings(model)
    found = {name: value for name, value in found.items() if not name.endswith("_multiplier")}
    return found | {
        "attention_multiplier": model.attention.scale,
        "attn_logit_softcapping": model.attention.softcap,
        "final_logit_softcapping": model.logits_softcap,
    }


def sizes_of_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `settings`, as `decoder` takes it."""
    found = llama.sizes_of_settings(given)
    del found["embedding_scale"]
    return found | {
        "softcap": given["attn_logit_softcapping"],
        "logits_softcap": given["final_logit_softcapping"],
    }


def from_settings(given: Mapping[str, Any]) -> Decoder:
    return decoder(architecture="gemma2", **sizes_of_settings(given))


def scalar_of_gguf(given: Mapping[str, Any], scaled_by_hidden: int) -> int | None:
    """query_pre_attn_scalar, which GGUF lacks: llama.cpp recognizes the one published size, of
    `scaled_by_hidden` layers, that has another than the heads' size."""
    if given["num_hidden_layers"] == scaled_by_hidden:
        return int(given["hidden_size"]) // int(given["num_attention_heads"])
    found = given.get("head_dim")
    return None if found is None else int(found)


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp's defaults for missing metadata."""
    return {
        "query_pre_attn_scalar": scalar_of_gguf(given, 46),
        "sliding_window": given.get("sliding_window") or 4096,
        "attn_logit_softcapping": given.get("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": given.get("final_logit_softcapping") or 30.0,
    }


HIDDEN_ACT = ("gelu_pytorch_tanh", "gelu")  # MindFormers' names of the tanh form


GEMMA2 = dataclasses.replace(
    llama.LLAMA,
    name="gemma2",
    read=read,
    names=NAMES,
    write=write,
    mindformers=MindFormers(
        llama.plain_section("Gemma2Config"),
        "Gemma2ForCausalLM",
        "llama",
        settings,
        from_settings,
        model="gemma2_2b",
        hidden_act=HIDDEN_ACT,
    ),
    gguf=GGUF(
        KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
        flags=llama_like.BIAS_FLAG,
        infer=infer_from_gguf,
    ),
    no_effect={
        "cache_implementation": KERNEL,
        "_sliding_window_pattern": "layer_types is beside it",
    },
    norms_less_one=True,
)
