"""Mixtures of experts, as config.json and model settings describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lite_runner.architectures.fields import MAX_EXPERTS, TRAINING, Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Name, Names, Role
from lite_runner.architectures.spec import Decoder, Experts


def counts(fields: Fields, *, experts: int, chosen: int) -> tuple[int, int]:
    """Experts of a layer, and of a token; `experts` and `chosen` are the defaults."""
    count = fields.integer("num_experts", "num_local_experts", default=experts, most=MAX_EXPERTS)
    of_token = fields.integer("num_experts_per_tok", default=chosen)
    if of_token > count:
        raise fields.fault("num_experts_per_tok", of_token, f"at most the {count} experts")
    return count, of_token


def dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers without experts: those of mlp_only_layers, and by decoder_sparse_step."""
    listed = fields.raw.get("mlp_only_layers")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(type(one) is not int or one < 0 for one in listed):
        raise fields.fault("mlp_only_layers", listed, "a list of layers, counted from 0")
    return _dense_layers(listed, fields.integer("decoder_sparse_step", default=1), layers)


def _dense_layers(listed: list[int], step: int, layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)


def to_settings(model: Decoder) -> dict[str, Any]:
    """Settings of the experts, which config.json has under the same names."""
    assert model.sparse is not None and model.sparse.experts is not None
    experts = model.sparse.experts
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "norm_topk_prob": experts.renormalized,
        "moe_intermediate_size": model.sparse.width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(model.dense_layers),
    }


def from_settings(given: Mapping[str, Any]) -> Mixture:
    """The inverse of `to_settings`."""
    listed, step = list(given["mlp_only_layers"] or ()), given["decoder_sparse_step"]
    return Mixture(
        Experts(given["num_experts"], given["num_experts_per_tok"], given["norm_topk_prob"]),
        given["moe_intermediate_size"] or given["intermediate_size"],
        _dense_layers(listed, step, given["num_layers"]),
    )


NO_EFFECT = dict.fromkeys(
    ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"), TRAINING
)
# GGUF metadata by the key of config.json.
KEYS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}


def names(router: tuple[str, str], experts: tuple[str, str], linears: tuple[str, ...]) -> Names:
    """Names of a layer's router and experts, each (MindFormers', Hugging Face's) below the layer;
    `linears`: Hugging Face's gate, down and up."""
    below = "model.layers.{}."
    ours, theirs = (below + prefix for prefix in experts)
    roles: tuple[Role, ...] = ("expert_gate", "expert_down", "expert_up")
    return {
        "router": Name(below + router[0], below + router[1]),
        **{
            role: Name(f"{ours}.{{}}.{own}", f"{theirs}.{{}}.{linear}", stacked=f"{ours}.{own}")
            for role, own, linear in zip(roles, ("w1", "w2", "w3"), linears, strict=True)
        },
    }
