"""Mixtral: a Mistral with experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from lite_runner.architectures import experts, llama, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Names
from lite_runner.architectures.settings import PREFIX, Translation
from lite_runner.architectures.spec import Decoder, Experts
from lite_runner.errors import show

NAMES: Names = {
    **llama_like.NAMES,
    **experts.names(
        ("feed_forward.router.dense", "block_sparse_moe.gate"),
        ("feed_forward.ffn", "block_sparse_moe.experts"),
        ("w1", "w2", "w3"),
    ),
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        num_key_value_heads=8, rope_theta=1000000.0, rms_norm_eps=1e-5, sliding_window=None
    )
    sizes = llama_like.sizes(fields, positions=131072)
    window = fields.optional_integer("sliding_window")
    count, chosen = experts.counts(fields, experts=8, chosen=2)
    return llama_like.decoder(
        architecture="mixtral",
        windows=(window,) * sizes["num_layers"],
        mixture=Mixture(Experts(count, chosen), sizes["intermediate_size"]),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    given = experts.to_settings(model)
    return llama_like.shared(model) | {
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": model.attention.window,
        "num_local_experts": given["num_experts"],
        "num_experts_per_tok": given["num_experts_per_tok"],
    }


# Settings of other routers, with the values that make one a Mixtral's.
_FIXED: dict[str, tuple[Any, ...]] = {
    "balance_via_topk_bias": (None, False),
    "enable_cold_hot_expert": (None, False),
    "first_k_dense_replace": (None, False, 0),
    "n_group": (None,),
    "norm_topk_prob": (None, True),
    "routed_scaling_factor": (None, 1, 1.0),
    "routing_policy": ("TopkRouterV2",),
    "shared_expert_num": (None, 0),
    "topk_group": (None,),
    "topk_method": (None, "greedy"),
    "use_gating_sigmoid": (None, False),
    "use_shared_expert_gating": (None, False),
}


def claims(raw: Mapping[str, Any]) -> bool:
    """True if a yaml of MindFormers has the experts of a Mixtral."""
    return experts.is_llama(raw) and not experts.moe_config(raw)[1].get("use_shared_expert_gating")


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """Experts of such a Llama; its sections are no longer without effect."""
    if not claims(raw):
        return
    section, given = experts.moe_config(raw)
    width = result.assignments.get(f"{PREFIX}intermediate_size")
    chosen = given.get(experts.CHOSEN, 1)
    if type(chosen) is int and chosen < 2:
        result.errors.append(
            f"{section}.{experts.CHOSEN}: got {chosen}, expected 2 or more: the probability of a"
            " single expert is not divided by itself in MindFormers, and is in a Mixtral"
        )
    if given.get("moe_intermediate_size", width) != width:
        result.errors.append(
            f"{section}.moe_intermediate_size: got {show(given['moe_intermediate_size'])}, expected"
            f" the intermediate_size of {show(width)}, which a Mixtral's experts have"
        )
    result.assignments |= {f"{PREFIX}type": "MixtralConfig", f"{PREFIX}num_experts_per_tok": chosen}
    others = ["moe_intermediate_size"]
    experts.translate(raw, result, "Mixtral", experts.MOE_NAMES, _FIXED, others)


MIXTRAL = dataclasses.replace(
    llama.LLAMA,
    name="mixtral",
    read=read,
    names=NAMES,
    write=write,
    mindformers=experts.mindformers(
        "MixtralConfig",
        "MixtralForCausalLM",
        "mixtral_8x7b",
        partial(llama_like.decoder, architecture="mixtral"),
        claims=claims,
        translate=translate,
    ),
    gguf=None,  # GGUF writes it as llama
    no_effect=experts.NO_EFFECT,
)
