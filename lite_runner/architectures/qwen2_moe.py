"""Qwen2-MoE: a Qwen2 with experts, and a network beside them that every token takes in part. In
MindFormers it is a Llama with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, MindFormers, experts, llama, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.settings import PREFIX, Translation
from lite_runner.architectures.spec import Decoder, Experts
from lite_runner.records import Count, dataclass

_LAYER, _MLP = "model.layers.{}", "feed_forward.shared_experts"
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
    fields = fields.with_defaults(num_key_value_heads=16, sliding_window=4096, max_window_layers=28)
    sizes = llama_like.sizes(fields, positions=32768)
    layers = sizes["num_layers"]
    slides = fields.flag("use_sliding_window", False)
    if slides and fields.raw.get("layer_types") is None:  # of the first layers, every other one
        first = fields.raw["max_window_layers"]
        if type(first) is not int or first < 0:
            raise fields.invalid("max_window_layers", first, "an integer from 0")
        kinds = [
            llama.SLIDING if layer % 2 == 0 and layer < first else llama.FULL
            for layer in range(layers)
        ]
        fields = fields.with_values(layer_types=kinds)
    count, chosen = experts.counts(fields, experts=60, chosen=4)
    shared = fields.integer("shared_expert_intermediate_size", default=5632)
    return llama_like.decoder(
        architecture="qwen2_moe",
        qkv_bias=fields.flag("qkv_bias", True),
        windows=llama.read_windows(fields, layers),
        mixture=Mixture(
            Experts(
                count, chosen, fields.flag("norm_topk_prob", False), shared=shared, shared_gate=True
            ),
            fields.integer("moe_intermediate_size", default=1408),
            experts.dense_layers(fields, layers),
        ),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    assert model.sparse is not None and model.sparse.experts is not None
    return (
        llama_like.shared(model)
        | llama.windows_to_settings(model)
        | experts.to_settings(model)
        | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "qkv_bias": model.attention.qkv_bias,
            "shared_expert_intermediate_size": model.sparse.experts.shared,
        }
    )


_SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeSettings(experts.MixtureSettings):
    """Settings of Qwen2 with experts."""

    type: Literal["Qwen2MoeConfig"] = "Qwen2MoeConfig"
    shared_expert_intermediate_size: Count  # of the network that every token takes


def settings(model: Decoder) -> dict[str, Any]:
    found = llama.settings(model) | experts.to_settings(model)
    return found | {_SHARED: write(model)[_SHARED]}


def from_settings(given: Mapping[str, Any]) -> Decoder:
    mixture = experts.from_settings(given)
    chosen = dataclasses.replace(mixture.experts, shared=given[_SHARED], shared_gate=True)
    return llama_like.decoder(
        architecture="qwen2_moe",
        mixture=dataclasses.replace(mixture, experts=chosen),
        **llama.sizes_of_settings(given),
    )


def claims(raw: Mapping[str, Any]) -> bool:
    """True if a yaml of MindFormers has such experts."""
    gated = experts.moe_config(raw)[1].get("use_shared_expert_gating")
    return experts.is_llama(raw) and gated is True


# Settings of other routers, with this one's values.
_FIXED: dict[str, tuple[Any, ...]] = {
    "balance_via_topk_bias": (None, False),
    "first_k_dense_replace": (None, False, 0),
    "n_group": (None,),
    "routed_scaling_factor": (None, 1, 1.0),
    "routing_policy": ("TopkRouterV2",),
    "topk_group": (None,),
    "topk_method": (None, "greedy"),
    "use_gating_sigmoid": (None, False),
    "use_shared_expert_gating": (True,),
}


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """The network beside the experts is as wide as several of them."""
    if not claims(raw):
        return
    given, own = experts.moe_config(raw)[1], raw["model"]["model_config"]
    width = given.get("moe_intermediate_size", own.get("intermediate_size"))
    shared = given.get("shared_expert_num", 0)
    numbers = isinstance(shared, int | float) and isinstance(width, int)
    result.assignments |= {
        f"{PREFIX}type": Qwen2MoeSettings.type,
        f"{PREFIX}norm_topk_prob": given.get("norm_topk_prob", True),
        f"{PREFIX}moe_intermediate_size": width,
        f"{PREFIX}{_SHARED}": int(shared * width) if numbers else shared,
    }
    others = ["norm_topk_prob", "moe_intermediate_size", "shared_expert_num"]
    experts.translate(raw, result, "Qwen2-MoE", experts.MOE_NAMES, _FIXED, others)


QWEN2_MOE = Architecture(
    "qwen2_moe",
    read,
    NAMES,
    write,
    MindFormers(
        Qwen2MoeSettings,
        "Qwen2MoeForCausalLM",
        "llama",
        settings,
        from_settings,
        model="qwen2_57b_a14b",
        hidden_act=("silu",),
        claims=claims,
        translate=translate,
    ),
    gguf=GGUF(
        llama_like.KEYS
        | llama_like.EXPERT_KEYS
        | {
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        flags={"qkv_bias": "blk.0.attn_q.bias"},
        # llama.cpp renormalizes never, and converts only models with experts in every layer.
        infer=lambda tensors, given: {"norm_topk_prob": False},
        name="qwen2moe",
    ),
    no_effect=experts.NO_EFFECT,
)
