"""OLMoE: a Llama with an RMSNorm over all query heads together, and over all key heads, and with
experts."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import GGUF, Architecture, experts, llama_like, qwen3
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Names
from lite_runner.architectures.spec import Decoder, Experts

NAMES: Names = {
    **{role: name for role, name in qwen3.NAMES.items() if role not in ("gate", "up", "down")},
    **experts.names(
        ("feed_forward.routed_experts.router.dense", "mlp.gate"),
        ("feed_forward.routed_experts.ffn", "mlp.experts"),
        ("gate_proj", "down_proj", "up_proj"),
    ),
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    bias = fields.flag("attention_bias", False)
    sizes = llama_like.sizes(fields, positions=4096)
    count, chosen = experts.counts(fields, experts=64, chosen=8)
    renormalized = fields.flag("norm_topk_prob", False)
    model = llama_like.decoder(
        architecture="olmoe",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        qk_norm_by_head=False,
        mixture=Mixture(Experts(count, chosen, renormalized), sizes["intermediate_size"]),
        **sizes,
    )
    return llama_like.changed(model, {"clip": fields.optional_number("clip_qkv")})


def write(model: Decoder) -> dict[str, Any]:
    given = experts.to_settings(model)
    names = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
    return (
        llama_like.shared(model)
        | {name: given[name] for name in names}
        | {"architectures": ["OlmoeForCausalLM"], "attention_bias": model.attention.qkv_bias}
        | {"clip_qkv": model.attention.clip}
    )


OLMOE = Architecture(
    "olmoe",
    read,
    NAMES,
    write,
    gguf=GGUF(
        llama_like.KEYS | llama_like.EXPERT_KEYS,
        flags=llama_like.BIAS_FLAG,
        infer=lambda tensors, given: {"norm_topk_prob": False},  # as llama.cpp computes it
    ),
    no_effect=experts.NO_EFFECT,
)
