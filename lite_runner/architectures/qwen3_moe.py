"""Qwen3-MoE: a Qwen3 with experts in all its layers, or in some."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from functools import partial
from typing import Any

from lite_runner.architectures import GGUF, experts, llama_like, qwen3
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Names
from lite_runner.architectures.spec import Decoder, Experts

# Names of MindFormers' qwen2_moe: its own qwen3_moe reads Hugging Face's files.
NAMES: Names = {
    **qwen3.NAMES,
    **experts.names(
        ("feed_forward.routed_experts.router.dense", "mlp.gate"),
        ("feed_forward.routed_experts.ffn", "mlp.experts"),
        ("gate_proj", "down_proj", "up_proj"),
    ),
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(num_key_value_heads=4, sliding_window=4096)
    sizes = llama_like.sizes(fields, positions=32768)
    layers = sizes["num_layers"]
    bias = fields.flag("attention_bias", False)
    given, slides = fields.raw["sliding_window"], fields.flag("use_sliding_window", False)
    window = None if given is None or not slides else fields.integer("sliding_window")
    count, chosen = experts.counts(fields, experts=128, chosen=8)
    return llama_like.decoder(
        architecture="qwen3_moe",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=(window,) * layers,
        mixture=Mixture(
            Experts(count, chosen, fields.flag("norm_topk_prob", False)),
            fields.integer("moe_intermediate_size", default=768),
            experts.dense_layers(fields, layers),
        ),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    return (
        llama_like.shared(model)
        | experts.to_settings(model)
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": model.attention.qkv_bias,
            "use_sliding_window": model.attention.window is not None,
            "sliding_window": model.attention.window,
        }
    )


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp renormalizes always, and converts only models with experts in every layer."""
    return {
        "norm_topk_prob": True,
        # The dense width, which no layer has, may be left out.
        "intermediate_size": given["moe_intermediate_size"],
    }


QWEN3_MOE = dataclasses.replace(
    qwen3.QWEN3,
    name="qwen3_moe",
    read=read,
    names=NAMES,
    write=write,
    mindformers=experts.mindformers(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        "qwen3_30b_a3b",
        partial(llama_like.decoder, architecture="qwen3_moe", qk_norm=True),
        **qwen3.MINDFORMERS,
    ),
    gguf=GGUF(
        llama_like.KEYS
        | llama_like.EXPERT_KEYS
        | {"moe_intermediate_size": "expert_feed_forward_length"},
        flags=llama_like.BIAS_FLAG,
        infer=infer_from_gguf,
        name="qwen3moe",
        also=("qwen3vlmoe",),
    ),
    no_effect=experts.NO_EFFECT | {"max_window_layers": "a window is of all layers"},
)
