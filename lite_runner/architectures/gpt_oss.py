"""gpt-oss: a Llama with biases, sinks in its attention, a window in every other layer, and experts
with biases and a clamped gate, whose matrices files have in one tensor a layer, or in MXFP4."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import GGUF, Architecture, experts, llama, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import FusedExperts, Name, Names, Role
from lite_runner.architectures.spec import Decoder, Experts, Rotary

_LAYER = "model.layers.{}"
_ALL = f"{_LAYER}.mlp.experts"
_FUSED: dict[Role, FusedExperts] = {
    "expert_gate": FusedExperts(f"{_ALL}.gate_up_proj", 0, 2, by_turns=True, transposed=True),
    "expert_up": FusedExperts(f"{_ALL}.gate_up_proj", 1, 2, by_turns=True, transposed=True),
    "expert_down": FusedExperts(f"{_ALL}.down_proj", 0, 1, transposed=True),
}
_EXPERTS = experts.names(
    ("feed_forward.routed_experts.router.dense", "mlp.router"),
    ("feed_forward.routed_experts.ffn", "mlp.experts"),
    ("gate_proj", "down_proj", "up_proj"),
)
NAMES: Names = {
    **{role: name for role, name in llama_like.NAMES.items() if role not in ("gate", "up", "down")},
    **llama_like.POST_ATTENTION_NORM,
    "sinks": Name(f"{_LAYER}.attention.sinks.", f"{_LAYER}.self_attn.sinks."),
    **experts.fused(_EXPERTS, _FUSED),
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"truncate": False, "original_max_position_embeddings": 4096}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        sliding_window=128,
        swiglu_alpha=1.702,
    )
    if fields.raw.get("rope_scaling") is None and fields.raw.get("rope_parameters") is None:
        fields = fields.with_values(rope_scaling=_YARN)
    fields.neutral(swiglu_alpha=1.702)
    sizes = llama_like.sizes(fields, positions=131072)
    layers, bias = sizes["num_layers"], fields.flag("attention_bias", True)
    if fields.raw.get("layer_types") is None:
        kinds = [(llama.SLIDING, llama.FULL)[one % 2] for one in range(layers)]
        fields = fields.with_values(layer_types=kinds)
    windows = llama.read_windows(fields.with_values(use_sliding_window=True), layers)
    count, chosen = experts.counts(fields, experts=128, chosen=4)
    model = llama_like.decoder(
        architecture="gpt_oss",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        windows=windows,
        mixture=Mixture(Experts(count, chosen, router_bias=True), sizes["intermediate_size"]),
        **sizes,
    )
    limit = fields.number("swiglu_limit", 7.0)
    gate = {"activation": "quick_gelu", "limit": limit}
    return llama_like.changed(model, {"sinks": True}, gate)


def write(model: Decoder) -> dict[str, Any]:
    given = experts.to_settings(model)
    rotary = model.rotary or Rotary()
    return llama_like.shared(model) | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
        "num_local_experts": given["num_experts"],
        "num_experts_per_tok": given["num_experts_per_tok"],
        "swiglu_limit": model.feed_forward.limit,
        **llama.layer_types(model, 128),
        "hidden_act": "silu",  # as files say; the network has its own
        "rope_scaling": {"rope_type": "default"}
        if rotary.scaling is None
        else llama_like.rope_scaling_to_hf(rotary.scaling),
    }


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The ramp of its YaRN ends between dimensions, which metadata has no word for."""
    rope = {name: given[name] for name in _YARN_KEYS if given[name] is not None}
    scaling = {"rope_type": "yarn", "truncate": False} | rope if rope.get("factor") else None
    return {"rope_scaling": scaling or {"rope_type": "default"}}


_YARN_KEYS = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
GPT_OSS = Architecture(
    "gpt_oss",
    read,
    NAMES,
    write,
    gguf=GGUF(
        llama_like.KEYS
        | llama_like.LOCAL_EXPERT_KEYS
        | _YARN_KEYS
        | {
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        flags=llama_like.BIAS_FLAG,
        infer=infer_from_gguf,
        name="gpt-oss",
    ),
    no_effect=experts.NO_EFFECT
    | {
        "experts_per_token": "num_experts_per_tok is beside it",
        "initial_context_length": "of rope_scaling",
    },
)
