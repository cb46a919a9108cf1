"""Gemma 1: a Llama with GELU and scaled embeddings."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import GGUF, Architecture, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder

_GELU = "gelu_pytorch_tanh"


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        num_key_value_heads=16, head_dim=256, tie_word_embeddings=True, hidden_act=_GELU
    )
    fields.neutral(use_bidirectional_attention=False)
    if fields.raw["hidden_act"] == "gelu":  # of the first files, which mean the other one
        fields = fields.with_values(hidden_act=_GELU)
    bias = fields.flag("attention_bias", False)
    sizes = llama_like.sizes(fields, positions=8192)
    return llama_like.decoder(
        architecture="gemma",
        embedding_scale=sizes["hidden_size"] ** 0.5,
        qkv_bias=bias,
        out_bias=bias,
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    return llama_like.shared(model) | {
        "architectures": ["GemmaForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
    }


GEMMA = Architecture(
    "gemma",
    read,
    llama_like.NAMES,
    write,
    gguf=GGUF(llama_like.KEYS, flags=llama_like.BIAS_FLAG),
    no_effect={"hidden_activation": "transformers does not read it"},
    norms_less_one=True,
)
