"""Mixtures of experts, as config.json and model settings describe them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from lite_runner.architectures import MindFormers, llama
from lite_runner.architectures.fields import MAX_EXPERTS, TRAINING, Fields
from lite_runner.architectures.llama import LlamaLikeSettings
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import FusedExperts, Name, Names, Role
from lite_runner.architectures.settings import PREFIX, Error, Translation, error, network_of
from lite_runner.architectures.spec import Decoder, Experts
from lite_runner.errors import show
from lite_runner.records import Count, Index, Range, dataclass


def counts(fields: Fields, *, experts: int, chosen: int) -> tuple[int, int]:
    """Experts of a layer, and of a token; `experts` and `chosen` are the defaults."""
    count = fields.integer("num_experts", "num_local_experts", default=experts, most=MAX_EXPERTS)
    of_token = fields.integer("num_experts_per_tok", default=chosen)
    if of_token > count:
        raise fields.invalid("num_experts_per_tok", of_token, f"at most the {count} experts")
    return count, of_token


def dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers without experts: those of mlp_only_layers, and by decoder_sparse_step."""
    listed = fields.raw.get("mlp_only_layers")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(type(one) is not int or one < 0 for one in listed):
        raise fields.invalid("mlp_only_layers", listed, "a list of layers, counted from 0")
    return _dense_layers(listed, fields.integer("decoder_sparse_step", default=1), layers)


def _dense_layers(listed: list[int], step: int, layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MixtureSettings(LlamaLikeSettings):
    """Settings of Qwen3-MoE and Mixtral; intermediate_size is of layers without experts."""

    num_experts: Annotated[int, Range(1, MAX_EXPERTS)]  # of a layer
    num_experts_per_tok: Count
    norm_topk_prob: bool = True  # a token's probabilities are divided by their sum
    moe_intermediate_size: Count | None = None  # of each expert; null: intermediate_size
    decoder_sparse_step: Count = 1  # each layer of that number has experts
    mlp_only_layers: tuple[Index, ...] | None = None  # layers without experts besides

    def errors(self) -> Iterator[Error]:
        yield from super().errors()
        if self.num_experts_per_tok > self.num_experts:
            yield error(
                f"num_experts_per_tok: got {self.num_experts_per_tok}, expected at most"
                f" num_experts={self.num_experts}",
                *("num_experts", "num_experts_per_tok"),
            )
        if self.mlp_bias:
            yield error("mlp_bias: got true, expected false with experts", "mlp_bias")


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
    listed, step = list(given["mlp_only_layers"] or ()), given["decoder_sparse_step"]
    return Mixture(
        Experts(given["num_experts"], given["num_experts_per_tok"], given["norm_topk_prob"]),
        given["moe_intermediate_size"] or given["intermediate_size"],
        _dense_layers(listed, step, given["num_layers"]),
    )


def mindformers(
    config: str, network: str, model: str, make: Callable[..., Decoder], **others: Any
) -> MindFormers:
    """See llama.mindformers: of models with experts, the same in all layers with some."""

    def write(found: Decoder) -> dict[str, Any]:
        return llama.settings(found) | to_settings(found)

    def read(given: Mapping[str, Any]) -> Decoder:
        return make(mixture=from_settings(given), **llama.sizes_of_settings(given))

    section = llama.plain_section(config, MixtureSettings)
    others = {"hidden_act": ("silu",)} | others
    return MindFormers(section, network, "llama", write, read, model=model, **others)


NO_EFFECT = dict.fromkeys(
    ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"), TRAINING
)
# GGUF metadata by the key of config.json.
GROUPED_KEYS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


def fused(given: Names, every: Mapping[Role, FusedExperts]) -> Names:
    """The names, of which Hugging Face has the experts of a layer in one tensor."""
    return {**given, **{role: replace(given[role], fused=one) for role, one in every.items()}}


_ROUTED = "feed_forward.routed_experts"
NEXT_TOKEN = dict.fromkeys(
    ("num_mtp_layers", "num_nextn_predict_layers"), "layers for multi-token prediction"
)


def grouped(
    fields: Fields, *, count: int, chosen: int, groups: tuple[int, int], scale: float, width: int
) -> Experts:
    """Experts that are chosen by sigmoids and a bias, in groups; the arguments are defaults."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    count = fields.integer(*names, default=count, most=MAX_EXPERTS)
    of_token = fields.integer("num_experts_per_tok", default=chosen)
    group_count = fields.integer("n_group", default=groups[0], most=count)
    chosen_groups = fields.integer("topk_group", default=groups[1])
    if count % group_count:
        raise fields.invalid("n_group", group_count, f"a divisor of the {count} experts")
    if chosen_groups > group_count:
        raise fields.invalid("topk_group", chosen_groups, f"at most the {group_count} groups")
    most = count // group_count * chosen_groups
    if of_token > most:
        raise fields.invalid("num_experts_per_tok", of_token, f"at most the {most} of its groups")
    if count // group_count < 2:
        raise fields.invalid("n_group", group_count, "groups of two experts and more")
    width = fields.integer("moe_intermediate_size", default=width)
    return Experts(
        count,
        of_token,
        fields.flag("norm_topk_prob", True),
        sigmoid=True,
        choice_bias=True,
        groups=group_count,
        chosen_groups=chosen_groups,
        best_of_group=2,
        scale=fields.number("routed_scaling_factor", scale),
        shared=fields.index("n_shared_experts", 1) * width,
    )


def grouped_to_settings(model: Decoder) -> dict[str, Any]:
    """The inverse of `grouped`, and how many layers are dense."""
    assert model.sparse is not None and model.sparse.experts is not None
    experts = model.sparse.experts
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "n_group": experts.groups,
        "topk_group": experts.chosen_groups,
        "norm_topk_prob": experts.renormalized,
        "routed_scaling_factor": experts.scale,
        "n_shared_experts": experts.shared // model.sparse.width,
        "moe_intermediate_size": model.sparse.width,
        "first_k_dense_replace": len(model.dense_layers),
    }


def shared_names(ours: str, theirs: str) -> Names:
    """Names of the network that every token takes, below the layer."""
    below = "model.layers.{}."
    roles: tuple[Role, ...] = ("shared_gate", "shared_down", "shared_up")
    linears = zip(roles, ("w1", "w2", "w3"), ("gate_proj", "down_proj", "up_proj"), strict=True)
    return {
        role: Name(f"{below}{ours}.{own}", f"{below}{theirs}.{linear}")
        for role, own, linear in linears
    }


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


GROUPED_NAMES: Names = {
    **names(
        (f"{_ROUTED}.router.dense", "mlp.gate"),
        (f"{_ROUTED}.ffn", "mlp.experts"),
        ("gate_proj", "down_proj", "up_proj"),
    ),
    "choice_bias": Name(
        "model.layers.{}.feed_forward.routed_experts.router.topk_bias.",
        "model.layers.{}.mlp.gate.e_score_correction_bias.",
    ),
    **shared_names("feed_forward.shared_experts", "mlp.shared_experts"),
}

# MindFormers' sections of the experts, of which the first that is there counts.
SECTIONS = (f"{PREFIX}moe_config", "moe_config")
COUNT, CHOSEN = "expert_num", "num_experts_chosen"
MOE_NAMES = {COUNT: "num_experts", CHOSEN: "num_experts_per_tok"}  # and ours
# Of training, and of how devices share the work. No token is dropped here, whatever the capacity.
MOE_NO_EFFECT = frozenset(
    """
    aux_loss_factor aux_loss_factors aux_loss_types capacity_factor cold_token_percent
    comp_comm_parallel comp_comm_parallel_degree cur_layer enable_sdrop expert_group_size
    expert_model_parallel group_wise_a2a hot_expert_num max_router_load moe_module_name
    moe_shared_expert_overlap router_dense_type save_token_distribution topk_bias_update_rate
    update_step use_allgather_dispatcher use_fused_ops_topkrouter z_loss_factor
    """.split()
)


def moe_config(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name and the contents of the section of the experts in a yaml of MindFormers."""
    for section in SECTIONS:
        found: Any = raw
        for name in section.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            return section, found
    return SECTIONS[-1], {}


def translate(
    raw: Mapping[str, Any],
    result: Translation,
    what: str,
    names: Mapping[str, str],
    fixed: Mapping[str, tuple[Any, ...]],
    others: Collection[str] = (),
) -> None:
    """Read moe_config under our names; `fixed`: expected values of the other keys for the router of
    `what`, None if the key may be missing; `others`: keys that were read already."""
    section, given = moe_config(raw)
    if given:
        result.ignored = [key for key in result.ignored if key not in SECTIONS]
    result.assignments |= {
        f"{PREFIX}{ours}": given[key] for key, ours in names.items() if key in given
    }
    for key, expected in fixed.items():
        if (value := given.get(key)) not in expected:
            wanted = f"expected {show(expected[-1])}, as in a {what}"
            result.errors.append(f"{section}.{key}: got {show(value)}, {wanted}")
    unknown = sorted(given.keys() - {*names, *fixed, *others, *MOE_NO_EFFECT})
    result.errors += [f"{section}.{key}: no such key of experts" for key in unknown]
    result.ignored += [f"{section}.{key}" for key in given if key in MOE_NO_EFFECT]


def is_llama(raw: Mapping[str, Any]) -> bool:
    """True if a yaml of MindFormers describes a Llama whose layers have experts: a Mixtral or a
    Qwen2-MoE."""
    network = network_of(raw)
    return network in ("LlamaForCausalLM", "ParallelLlamaForCausalLM") and has_experts(raw)


def has_experts(raw: Mapping[str, Any]) -> bool:
    """True if a yaml of MindFormers is of a mixture of experts."""
    return moe_config(raw)[1].get(COUNT) not in (1, None)


def unsupported(raw: Mapping[str, Any]) -> str:
    """The error of experts that no model here has in that form."""
    section, given = moe_config(raw)
    return (
        f"{section}.{COUNT}: {show(given[COUNT])} is not available: model=mixtral_8x7b or"
        " model=qwen3_30b_a3b has experts, by num_experts"
    )
