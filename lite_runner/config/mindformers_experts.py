"""Translating moe_config of a MindFormers yaml: a LlamaConfig with experts is a Mixtral."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lite_runner.config.fields import show
from lite_runner.config.yaml_file import at

CONFIG, NETWORK = "MixtralConfig", "MixtralForCausalLM"
_LLAMA = ("LlamaForCausalLM", "ParallelLlamaForCausalLM")
SECTIONS = ("model.model_config.moe_config", "moe_config")  # the first that is there
_COUNT, _CHOSEN = "expert_num", "num_experts_chosen"
# What else a router would compute, by the values with which it is a Mixtral's: null means that the
# key may be missing, which is MindFormers' default.
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
# Of training, and of how devices share the work. No token is dropped here, whatever the capacity.
_NO_EFFECT = frozenset(
    """
    aux_loss_factor aux_loss_factors aux_loss_types capacity_factor cold_token_percent
    comp_comm_parallel comp_comm_parallel_degree cur_layer enable_sdrop expert_group_size
    expert_model_parallel group_wise_a2a hot_expert_num max_router_load moe_module_name
    moe_shared_expert_overlap router_dense_type save_token_distribution topk_bias_update_rate
    update_step use_allgather_dispatcher use_fused_ops_topkrouter z_loss_factor
    """.split()
)
_INSTEAD = "model=mixtral_8x7b or model=qwen3_30b_a3b has experts, by num_experts"


def has_experts(raw: Mapping[str, Any]) -> bool:
    """Whether a file describes a Llama whose layers have experts."""
    several = _section(raw)[1].get(_COUNT) not in (1, None)
    return several and at(raw, "model.arch.type") in _LLAMA


def settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of model_config that stand for the experts of such a file."""
    given = _section(raw)[1]
    chosen = given.get(_CHOSEN, 1)
    return {"type": CONFIG, "num_experts": given[_COUNT], "num_experts_per_tok": chosen}


def ignored(raw: Mapping[str, Any]) -> list[str]:
    """The keys of its experts that have no effect here."""
    section, given = _section(raw)
    return [f"{section}.{name}" for name in given if name in _NO_EFFECT]


def faults(raw: Mapping[str, Any], width: Any, *, mixture: bool) -> Iterator[str]:
    """Why a file's experts cannot be computed.

    `width`: its intermediate_size. `mixture`: the model that it is merged over has experts.
    """
    section, given = _section(raw)
    count = given.get(_COUNT)
    if count in (1, None):
        return
    if not (mixture and has_experts(raw)):
        yield f"{section}.{_COUNT}: {show(count)} is not available: {_INSTEAD}"
        return
    chosen = given.get(_CHOSEN, 1)
    if type(chosen) is int and chosen < 2:
        yield (
            f"{section}.{_CHOSEN}: got {chosen}, expected 2 or more: the probability of a single"
            " expert is not divided by itself in MindFormers, and is in a Mixtral"
        )
    for name, expected in _FIXED.items():
        if (value := given.get(name)) not in expected:
            wanted = show(expected[-1])
            yield f"{section}.{name}: got {show(value)}, expected {wanted}, as in a Mixtral"
    if given.get("moe_intermediate_size", width) != width:
        yield (
            f"{section}.moe_intermediate_size: got {show(given['moe_intermediate_size'])}, expected"
            f" the intermediate_size of {show(width)}, which a Mixtral's experts have"
        )
    known = {*_FIXED, *_NO_EFFECT, _COUNT, _CHOSEN, "moe_intermediate_size"}
    for name in sorted(given.keys() - known):
        yield f"{section}.{name}: no such key of experts"


def _section(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The section of the experts, and its name."""
    for name in SECTIONS:
        if isinstance(found := at(raw, name), Mapping):
            return name, found
    return SECTIONS[-1], {}
