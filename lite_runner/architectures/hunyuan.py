"""Hunyuan, dense: a Llama with RMSNorm on each query and key head behind their rotation."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import llama_like
from lite_runner.architectures.architecture import Architecture
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder

_LAYER = "model.layers.{}"
NAMES: Names = {
    **llama_like.NAMES,
    "query_norm": Name(f"{_LAYER}.attention.q_norm", f"{_LAYER}.self_attn.query_layernorm"),
    "key_norm": Name(f"{_LAYER}.attention.k_norm", f"{_LAYER}.self_attn.key_layernorm"),
}


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
    )
    fields = _with_plain_theta(fields)
    bias = fields.flag("attention_bias", False)
    model = llama_like.decoder(
        architecture="hunyuan_v1_dense",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        **llama_like.sizes(fields, positions=2048),
    )
    return llama_like.changed(model, {"qk_norm_late": True})


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
    """config.json."""
    return llama_like.shared(model) | {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
    }


HUNYUAN = Architecture(
    "hunyuan_v1_dense",
    read,
    NAMES,
    write,
    no_effect={
        "eod_token_id": "of the tokenizer",
        "pretraining_tp": KERNEL,
    },
)
