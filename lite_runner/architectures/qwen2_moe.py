"""Qwen2-MoE: a Qwen2 with experts, and a network beside them that every token takes in part."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import experts, llama_like, llama_settings
from lite_runner.architectures.architecture import GGUF, Architecture
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder, Experts

_LAYER, _MLP = "model.layers.{}", "feed_forward.shared_expert"
NAMES: Names = {
    **llama_like.NAMES,
    **experts.names(
        ("feed_forward.routed_experts.router.dense", "mlp.gate"),
        ("feed_forward.routed_experts.ffn", "mlp.experts"),
        ("gate_proj", "down_proj", "up_proj"),
    ),
    "shared_router": Name(f"{_LAYER}.{_MLP}_gate", f"{_LAYER}.mlp.shared_expert_gate"),
    **experts.shared_names(_MLP, "mlp.shared_expert"),
}


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields = fields.with_defaults(num_key_value_heads=16, sliding_window=4096, max_window_layers=28)
    sizes = llama_like.sizes(fields, positions=32768)
    layers = sizes["num_layers"]
    slides = fields.flag("use_sliding_window", False)
    if slides and fields.raw.get("layer_types") is None:  # of the first layers, every other one
        first = fields.raw["max_window_layers"]
        if type(first) is not int or first < 0:
            raise fields.invalid("max_window_layers", first, "an integer from 0")
        kinds = [
            llama_settings.SLIDING if layer % 2 == 0 and layer < first else llama_settings.FULL
            for layer in range(layers)
        ]
        fields = fields.with_values(layer_types=kinds)
    count, chosen = experts.counts(fields, experts=60, chosen=4)
    shared = fields.integer("shared_expert_intermediate_size", default=5632)
    return llama_like.decoder(
        architecture="qwen2_moe",
        qkv_bias=fields.flag("qkv_bias", True),
        windows=llama_settings.read_windows(fields, layers),
        mixture=Mixture(
            Experts(
                count,
                chosen,
                fields.flag("norm_topk_prob", False),
                shared=shared,
                shared_gate=True,
            ),
            fields.integer("moe_intermediate_size", default=1408),
            experts.dense_layers(fields, layers),
        ),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    assert model.sparse is not None and model.sparse.experts is not None
    return (
        llama_like.shared(model)
        | llama_settings.windows_to_settings(model)
        | experts.to_settings(model)
        | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "qkv_bias": model.attention.qkv_bias,
            "shared_expert_intermediate_size": model.sparse.experts.shared,
        }
    )


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp renormalizes never, and converts only models with experts in every layer."""
    return {"qkv_bias": "blk.0.attn_q.bias" in tensors, "norm_topk_prob": False}


QWEN2_MOE = Architecture(
    "qwen2_moe",
    read,
    NAMES,
    write,
    gguf=GGUF(
        llama_like.KEYS
        | experts.KEYS
        | {
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        infer=infer_from_gguf,
        name="qwen2moe",
    ),
    no_effect=experts.NO_EFFECT,
)
