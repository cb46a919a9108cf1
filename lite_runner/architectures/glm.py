"""GLM-4 in the form of transformers, `glm` and `glm4`: a Llama with rotary positions on half of
each head, and gate and up fused; glm4 has norms behind attention and feed-forward too."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from functools import partial
from typing import Any, Literal

from lite_runner.architectures import GGUF, llama, llama_like, row_order, stacked
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder

_HALF = 0.5  # of a head is rotated
_LAYER = "model.layers.{}"
_GATE_UP = f"{_LAYER}.mlp.gate_up_proj"
NAMES: Names = {
    **llama_like.NAMES,
    "gate": Name(f"{_LAYER}.feed_forward.w1", _GATE_UP, 0),
    "up": Name(f"{_LAYER}.feed_forward.w3", _GATE_UP, 1),
}
NAMES_4: Names = {
    **NAMES,
    "attention_post_norm": Name(
        f"{_LAYER}.post_attention_norm", f"{_LAYER}.post_self_attn_layernorm"
    ),
    "feed_forward_post_norm": Name(f"{_LAYER}.post_ffn_norm", f"{_LAYER}.post_mlp_layernorm"),
}


def decoder(architecture: str, norm_eps: float, **sizes: Any) -> Decoder:
    norms: Literal["before", "both"] = "before" if architecture == "glm" else "both"
    return llama_like.decoder(architecture=architecture, norm_eps=norm_eps, norms=norms, **sizes)


def read(fields: Fields, architecture: str) -> Decoder:
    fields = fields.with_defaults(num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-07)
    return decoder(
        architecture,
        qkv_bias=fields.flag("attention_bias", True),
        **llama_like.sizes(fields, positions=131072, partial=_HALF),
    )


def write(model: Decoder) -> dict[str, Any]:
    return llama_like.shared(model) | {
        "architectures": ["GlmForCausalLM" if model.architecture == "glm" else "Glm4ForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
        "partial_rotary_factor": llama_like.rotated_share(model),
    }


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The size of a head, and its rotated fraction."""
    head_dim = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    return llama_like.infer_rotated_share(tensors, given) | {"head_dim": head_dim}


GLM = dataclasses.replace(
    llama.LLAMA,
    name="glm",
    read=lambda fields: read(fields, "glm"),
    names=NAMES,
    write=write,
    mindformers=llama.mindformers(
        "GlmConfig", "GlmForCausalLM", "glm4_9b_hf", partial(decoder, "glm")
    ),
    gguf=None,  # llama.cpp has it as chatglm
    stored_rows=row_order.interleaved(stacked),
)
GLM4 = dataclasses.replace(
    GLM,
    name="glm4",
    read=lambda fields: read(fields, "glm4"),
    names=NAMES_4,
    mindformers=llama.mindformers(
        "Glm4Config", "Glm4ForCausalLM", "glm4_9b_0414", partial(decoder, "glm4")
    ),
    gguf=GGUF(
        llama_like.KEYS | llama_like.PARTIAL_KEYS,
        permuted=True,
        flags=llama_like.BIAS_FLAG,
        infer=infer_from_gguf,
    ),
)
