"""OLMo 2: a Llama with norms behind attention and feed-forward in place of those before, and an
RMSNorm over all query heads together, and over all key heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import GGUF, llama, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder

_LAYER = "model.layers.{}"
NAMES: Names = {
    **{role: name for role, name in llama_like.NAMES.items() if not role.endswith("_norm")},
    **llama_like.QUERY_KEY_NORMS,
    "attention_post_norm": Name(
        f"{_LAYER}.post_attention_norm", f"{_LAYER}.post_attention_layernorm"
    ),
    "feed_forward_post_norm": Name(
        f"{_LAYER}.post_ffn_norm", f"{_LAYER}.post_feedforward_layernorm"
    ),
}


def decoder(architecture: str = "olmo2", **sizes: Any) -> Decoder:
    return llama_like.decoder(
        architecture=architecture, qk_norm=True, qk_norm_by_head=False, norms="after", **sizes
    )


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    bias = fields.flag("attention_bias", False)
    return decoder(qkv_bias=bias, out_bias=bias, **llama_like.sizes(fields, positions=2048))


def write(model: Decoder) -> dict[str, Any]:
    return llama_like.shared(model) | {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
    }


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Biases by their tensors; with a window it is an OLMo 3, which llama.cpp calls OLMo 2, too."""
    found: dict[str, Any] = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    if given["sliding_window"]:
        found["model_type"] = "olmo3"
    if isinstance(given["_pattern"], list):
        kinds = {True: llama.SLIDING, False: llama.FULL}
        found["layer_types"] = [kinds[bool(one)] for one in given["_pattern"]]
    return found


OLMO2 = dataclasses.replace(
    llama.LLAMA,
    name="olmo2",
    read=read,
    names=NAMES,
    write=write,
    mindformers=llama.mindformers("Olmo2Config", "Olmo2ForCausalLM", "olmo2_1b", decoder),
    gguf=GGUF(
        llama_like.KEYS
        | {"sliding_window": "attention.sliding_window"}
        | {"_pattern": "attention.sliding_window_pattern"},
        infer=infer_from_gguf,
    ),
)
