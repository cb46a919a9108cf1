"""GraniteMoE: a Granite with experts, whose matrices files have in one tensor a layer."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import GGUF, Architecture, experts, granite, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import FusedExperts, Names, Role
from lite_runner.architectures.spec import Decoder, Experts

_MOE = "model.layers.{}.block_sparse_moe"
_FUSED: dict[Role, FusedExperts] = {
    "expert_gate": FusedExperts(f"{_MOE}.input_linear.weight", 0, 2),
    "expert_up": FusedExperts(f"{_MOE}.input_linear.weight", 1, 2),
    "expert_down": FusedExperts(f"{_MOE}.output_linear.weight", 0, 1),
}
_EXPERTS = experts.names(
    ("feed_forward.routed_experts.router.dense", "block_sparse_moe.router.layer"),
    ("feed_forward.routed_experts.ffn", "block_sparse_moe.experts"),
    ("gate_proj", "down_proj", "up_proj"),
)
NAMES: Names = {
    **{role: name for role, name in llama_like.NAMES.items() if role not in ("gate", "up", "down")},
    **experts.fused(_EXPERTS, _FUSED),
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(attention_multiplier=1.0)
    sizes = llama_like.sizes(fields, positions=2048)
    count, chosen = experts.counts(fields, experts=8, chosen=2)
    bias = fields.flag("attention_bias", False)
    return llama_like.decoder(
        architecture="granitemoe",
        qkv_bias=bias,
        out_bias=bias,
        mixture=Mixture(Experts(count, chosen), sizes["intermediate_size"]),
        **granite.multipliers(fields),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    given = experts.to_settings(model)
    return granite.shared(model) | {
        "architectures": ["GraniteMoeForCausalLM"],
        "num_local_experts": given["num_experts"],
        "num_experts_per_tok": given["num_experts_per_tok"],
    }


GRANITE_MOE = Architecture(
    "granitemoe",
    read,
    NAMES,
    write,
    gguf=GGUF(
        granite.KEYS | llama_like.LOCAL_EXPERT_KEYS,
        permuted=True,
        flags=llama_like.BIAS_FLAGS,
        infer=granite.infer_from_gguf,
    ),
    no_effect=experts.NO_EFFECT,
)
