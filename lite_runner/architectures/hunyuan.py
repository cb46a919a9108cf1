"""Hunyuan: a Llama with RMSNorm on each query and key head behind their rotation, dense or with
experts, beside which is a network that every token takes."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import GGUF, Architecture, experts, llama_like
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder, Experts

_LAYER = "model.layers.{}"
NAMES: Names = {
    **llama_like.NAMES,
    "query_norm": Name(f"{_LAYER}.attention.q_norm", f"{_LAYER}.self_attn.query_layernorm"),
    "key_norm": Name(f"{_LAYER}.attention.k_norm", f"{_LAYER}.self_attn.key_layernorm"),
}


MOE_NAMES: Names = {
    **{role: name for role, name in NAMES.items() if role not in ("gate", "up", "down")},
    **experts.names(
        ("feed_forward.routed_experts.router.dense", "mlp.gate.wg"),
        ("feed_forward.routed_experts.ffn", "mlp.experts"),
        ("gate_proj", "down_proj", "up_proj"),
    ),
    **experts.shared_names("feed_forward.shared_experts", "mlp.shared_mlp"),
}


def read(fields: Fields, architecture: str = "hunyuan_v1_dense") -> Decoder:
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    fields = _with_plain_theta(fields)
    bias = fields.flag("attention_bias", False)
    sizes, mixture = llama_like.sizes(fields, positions=2048), None
    if architecture == "hunyuan_v1_moe":
        fields.neutral(use_qk_norm=True, use_cla=False, use_mla=False)
        width = sizes["intermediate_size"]
        given = {name: _same_of_layers(fields, name) for name in _OF_LAYERS}
        fields = fields.with_values(**given).with_defaults(num_experts_per_tok=given["moe_topk"])
        fields.neutral(num_shared_expert=1, moe_intermediate_size=width)
        count, chosen = experts.counts(fields, experts=1, chosen=1)
        mixture = Mixture(Experts(count, chosen, shared=width), width)
    model = llama_like.decoder(
        architecture=architecture,
        mixture=mixture,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        **sizes,
    )
    return llama_like.changed(model, {"qk_norm_late": True})


_OF_LAYERS = ("moe_intermediate_size", "moe_topk", "num_experts", "num_shared_expert")


def _same_of_layers(fields: Fields, key: str) -> Any:
    """A number that files may have once or of each layer, where it must be the same."""
    value = fields.raw.get(key)
    if not isinstance(value, list):
        return value
    if not value or any(one != value[0] for one in value):
        raise fields.invalid(key, value, "the same of all layers")
    return value[0]


def _with_plain_theta(fields: Fields) -> Fields:
    """Its "dynamic" scaling is a fixed base, theta * alpha^(d / (d - 2)) with heads of d."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.raw.get(key)
        if not isinstance(rope, dict) or not rope.get("alpha"):
            continue
        section = fields.section(key)
        section.choice("rope_type", ("dynamic",))
        section.choice("type", ("dynamic",))
        heads = fields.integer("num_attention_heads")
        given = fields.optional_integer("head_dim")
        head_dim = given or fields.head_dim(fields.integer("hidden_size"), heads)
        theta = section.number("rope_theta", fields.number("rope_theta", 10000.0))
        theta *= section.number("alpha") ** (head_dim / (head_dim - 2))
        rest = {name: one for name, one in rope.items() if name not in _OF_DYNAMIC}
        plain = rest | {"rope_type": "default", "rope_theta": theta}
        return fields.with_values(**{key: plain})
    return fields


_OF_DYNAMIC = (
    *("alpha", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"),
    *("rope_type", "type"),
)


def write(model: Decoder) -> dict[str, Any]:
    return llama_like.shared(model) | {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
    }


def write_moe(model: Decoder) -> dict[str, Any]:
    """config.json of the model with experts."""
    given = experts.to_settings(model)
    return write(model) | {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "num_experts": given["num_experts"],
        "moe_topk": given["num_experts_per_tok"],
    }


HUNYUAN = Architecture(
    "hunyuan_v1_dense",
    read,
    NAMES,
    write,
    gguf=GGUF(llama_like.KEYS, flags=llama_like.BIAS_FLAG, name="hunyuan-dense"),
    no_effect={"eod_token_id": "of the tokenizer", "pretraining_tp": KERNEL},
)
HUNYUAN_MOE = dataclasses.replace(
    HUNYUAN,
    name="hunyuan_v1_moe",
    read=lambda fields: read(fields, "hunyuan_v1_moe"),
    names=MOE_NAMES,
    write=write_moe,
    gguf=GGUF(
        llama_like.KEYS | {"num_experts": "expert_count", "moe_topk": "expert_used_count"},
        flags=llama_like.BIAS_FLAG,
        name="hunyuan-moe",
    ),
    no_effect={**HUNYUAN.no_effect, **experts.NO_EFFECT, "use_mixed_mlp_moe": KERNEL},
)
