"""Qwen3: a Llama with RMSNorm on each query and key head."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import llama, llama_like, llama_settings
from lite_runner.architectures.architecture import GGUF
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder

NAMES: Names = {
    **llama_like.NAMES,
    "query_norm": Name("model.layers.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm"),
    "key_norm": Name("model.layers.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm"),
}


def decoder(**sizes: Any) -> Decoder:
    """See llama_like.decoder."""
    return llama_like.decoder(architecture="qwen3", qk_norm=True, **sizes)


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=32)
    sizes = llama_like.sizes(fields, positions=32768)
    bias = fields.flag("attention_bias", False)
    return decoder(
        qkv_bias=bias,
        out_bias=bias,
        windows=llama_settings.read_windows(fields, sizes["num_layers"]),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    return (
        llama_like.shared(model)
        | llama_settings.windows_to_settings(model)
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": model.attention.qkv_bias,
        }
    )


QWEN3 = dataclasses.replace(
    llama.LLAMA,
    name="qwen3",
    read=read,
    names=NAMES,
    write=write,
    mindformers=llama_settings.mindformers("Qwen3Config", "Qwen3ForCausalLM", decoder),
    gguf=GGUF(
        llama_like.KEYS,
        infer=lambda tensors, given: {"attention_bias": "blk.0.attn_q.bias" in tensors},
    ),
)
