"""Granite: a Llama with multipliers of embeddings, attention scores, residual connections and
logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from functools import partial
from typing import Any

from lite_runner.architectures import GGUF, llama, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder


def read(fields: Fields) -> Decoder:
    return llama_like.decoder(
        architecture="granite",
        **llama_like.read_biases(fields),
        **multipliers(fields),
        **llama_like.sizes(fields, positions=2048),
    )


def multipliers(fields: Fields) -> dict[str, Any]:
    """The fields of config.json that Granite and GraniteMoE share, as llama_like.decoder takes
    them."""
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "scale": fields.number("attention_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logits_scaling": fields.number("logits_scaling", 1.0),
    }


def write(model: Decoder) -> dict[str, Any]:
    return shared(model) | {
        "architectures": ["GraniteForCausalLM"],
        "mlp_bias": model.feed_forward.bias,
    }


def shared(model: Decoder) -> dict[str, Any]:
    """The part of config.json that Granite and GraniteMoE share."""
    scale = model.attention.scale
    return llama_like.shared(model) | {
        "attention_bias": model.attention.qkv_bias,
        "embedding_multiplier": model.embedding_scale,
        "attention_multiplier": model.head_dim**-0.5 if scale is None else scale,
        "residual_multiplier": model.blocks[0].residual_scale,
        "logits_scaling": model.logits_scaling,
    }


def settings(model: Decoder) -> dict[str, Any]:
    """MindFormers settings besides the shared ones: all multipliers, also those of 1."""
    return llama.settings(model) | llama.multipliers(model)


KEYS = llama_like.KEYS | {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Without attention.scale, llama.cpp's default, not config.json's."""
    if given.get("attention_multiplier"):
        return {}
    head_dim = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    return {"attention_multiplier": head_dim**-0.5}


GRANITE = dataclasses.replace(
    llama.LLAMA,
    name="granite",
    read=read,
    write=write,
    mindformers=llama.mindformers(
        "GraniteConfig",
        "GraniteForCausalLM",
        "granite3.1_2b",
        partial(llama_like.decoder, architecture="granite"),
        settings,
    ),
    gguf=GGUF(KEYS, permuted=True, flags=llama_like.BIAS_FLAGS, infer=infer_from_gguf),
)
