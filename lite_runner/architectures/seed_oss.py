"""Seed-OSS: a Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import GGUF, Architecture, llama_like
from lite_runner.architectures.fields import KERNEL, TRAINING, Fields
from lite_runner.architectures.spec import Decoder


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(num_key_value_heads=8, head_dim=128)
    return llama_like.decoder(
        architecture="seed_oss",
        qkv_bias=fields.flag("attention_bias", True),
        out_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        **llama_like.sizes(fields, positions=524288),
    )


def write(model: Decoder) -> dict[str, Any]:
    return llama_like.shared(model) | {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
        "attention_out_bias": model.attention.out_bias,
        "mlp_bias": model.feed_forward.bias,
    }


_FLAGS = llama_like.BIAS_FLAGS | {"attention_out_bias": "blk.0.attn_output.bias"}
SEED_OSS = Architecture(
    "seed_oss",
    read,
    {**llama_like.NAMES, **llama_like.POST_ATTENTION_NORM},
    write,
    gguf=GGUF(llama_like.KEYS, flags=_FLAGS),
    no_effect={"pretraining_tp": KERNEL, "residual_dropout": TRAINING},
)
