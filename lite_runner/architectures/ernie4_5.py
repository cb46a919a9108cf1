"""ERNIE 4.5, dense: a Llama whose rotations turn neighbours, maybe with biases."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import GGUF, Architecture, apart, llama_like, row_order
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    )
    bias = fields.flag("use_bias", False)
    return llama_like.decoder(
        architecture="ernie4_5",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        **llama_like.sizes(fields, positions=131072),
    )


def write(model: Decoder) -> dict[str, Any]:
    return llama_like.shared(model) | {
        "architectures": ["Ernie4_5ForCausalLM"],
        "use_bias": model.feed_forward.bias,
    }


_ROWS = row_order.interleaved(apart)
ERNIE4_5 = Architecture(
    "ernie4_5",
    read,
    llama_like.NAMES,
    write,
    gguf=GGUF(llama_like.KEYS, flags={"use_bias": "blk.0.attn_q.bias"}, rows=_ROWS),
    stored_rows=_ROWS,
)
