"""DeepSeek V2, V3 and R1, Moonlight: latent attention, experts in groups, a network beside them,
and dense layers first. V3's experts are chosen by sigmoids and a bias, V2's by a softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any, Literal

from lite_runner.architectures import (
    GGUF,
    Architecture,
    MindFormers,
    Rows,
    experts,
    llama,
    llama_like,
)
from lite_runner.architectures.fields import KERNEL, MAX_EXPERTS, Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Name, Names, Parameter
from lite_runner.architectures.settings import PREFIX, Error, Translation, error, network_of
from lite_runner.architectures.spec import Decoder, Experts, Latent, Norm, Rotary
from lite_runner.errors import show
from lite_runner.records import Count, Index, Positive, Range, dataclass

_OURS, _LAYER = "model.layers.{}.attention", "model.layers.{}.self_attn"
_LATENT: Names = {
    "latent_query": Name(f"{_OURS}.q2l_proj", f"{_LAYER}.q_a_proj"),
    "latent_query_norm": Name(f"{_OURS}.lq_norm", f"{_LAYER}.q_a_layernorm"),
    "query": Name(f"{_OURS}.l2q_proj", f"{_LAYER}.q_b_proj", gguf="blk.{}.attn_q_b"),
    "latent": Name(f"{_OURS}.kv2l", f"{_LAYER}.kv_a_proj_with_mqa"),
    "latent_norm": Name(f"{_OURS}.lkv_norm", f"{_LAYER}.kv_a_layernorm"),
    "latent_values": Name(f"{_OURS}.lkv2kv", f"{_LAYER}.kv_b_proj"),
}
_OTHERS = {
    role: name
    for role, name in llama_like.NAMES.items()
    if role not in ("embedding", "query", "key", "value")
}
NAMES: Names = {
    "embedding": llama_like.NAMES["embedding"],
    **_LATENT,
    **_OTHERS,
    **experts.GROUPED_NAMES,
}
_DIRECT: Names = {"query": Name(f"{_OURS}.wq", f"{_LAYER}.q_proj", gguf="blk.{}.attn_q")}
_WIDTH, _IN_GROUPS = 2048, "group_limited_greedy"
_EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps is


def read(fields: Fields) -> Decoder:
    """From config.json of DeepSeek V3."""
    found = experts.grouped(fields, count=256, chosen=8, groups=(8, 4), scale=2.5, width=_WIDTH)
    mixture = Mixture(
        found,
        fields.integer("moe_intermediate_size", default=_WIDTH),
        range(fields.index("first_k_dense_replace", 3)),
    )
    return _read(fields, "deepseek_v3", mixture, interleaved=fields.flag("rope_interleave", True))


def read_v2(fields: Fields) -> Decoder:
    """From config.json of DeepSeek V2."""
    fields = fields.with_defaults(n_shared_experts=2)
    # The published code leaves out routed_scaling_factor then, and transformers does not norm.
    fields.neutral(norm_topk_prob=False, mlp_bias=False)
    fields.choice("topk_method", ("greedy", _IN_GROUPS))
    if fields.raw.get("topk_method") != _IN_GROUPS:
        fields = fields.with_values(n_group=1, topk_group=1)
    found = experts.grouped(fields, count=64, chosen=6, groups=(1, 1), scale=1.0, width=1407)
    found = dataclasses.replace(
        found, renormalized=False, sigmoid=False, choice_bias=False, best_of_group=1
    )
    mixture = Mixture(
        found,
        fields.integer("moe_intermediate_size", default=1407),
        range(fields.index("first_k_dense_replace", 0)),
    )
    return _read(fields, "deepseek_v2", mixture)


def _read(
    fields: Fields, architecture: str, mixture: Mixture, *, interleaved: bool = True
) -> Decoder:
    plain_queries = "q_lora_rank" in fields.raw and fields.raw["q_lora_rank"] is None
    latent = Latent(
        rank=fields.integer("kv_lora_rank", default=512),
        rotated=fields.integer("qk_rope_head_dim", default=64),
        plain=fields.integer("qk_nope_head_dim", default=128),
        value=fields.integer("v_head_dim", default=128),
        norm=Norm("rms", _EPS),
        query_rank=None if plain_queries else fields.integer("q_lora_rank", default=1536),
        interleaved=interleaved,
    )
    if latent.rotated % 2 or latent.rank % 2:
        raise fields.invalid("qk_rope_head_dim", latent.rotated, "even numbers, as kv_lora_rank")
    heads = fields.integer("num_attention_heads")
    same = fields.with_values(head_dim=latent.rotated, num_key_value_heads=heads)
    positions = 4096 if architecture == "deepseek_v3" else 2048
    sizes = llama_like.sizes(same, positions=positions)
    bias = fields.flag("attention_bias", False)
    sizes |= {"architecture": architecture, "mixture": mixture, "qkv_bias": bias, "out_bias": bias}
    return decoder(latent, **sizes)


def decoder(latent: Latent, *, rotary: Rotary, **sizes: Any) -> Decoder:
    """A decoder with latent attention; see llama_like.decoder."""
    scale, scaling = (latent.plain + latent.rotated) ** -0.5, rotary.scaling
    if scaling is not None and scaling.mscale_all_dim:
        from lite_runner.architectures.positions import yarn_mscale  # imports NumPy

        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    sizes |= {
        "rotary": dataclasses.replace(rotary, dims=latent.rotated),
        "head_dim": latent.rank + latent.rotated,
        "n_kv_heads": 1,
    }
    model = llama_like.decoder(scale=scale, **sizes)
    return llama_like.changed(model, {"latent": latent})


def write(model: Decoder) -> dict[str, Any]:
    latent = model.attention.latent
    assert latent is not None
    found = llama_like.shared(model)
    del found["head_dim"]
    if model.architecture == "deepseek_v2":
        found["topk_method"] = _IN_GROUPS
    elif not latent.interleaved:
        found["rope_interleave"] = False
    name = "DeepseekV2" if model.architecture == "deepseek_v2" else "DeepseekV3"
    return (
        found
        | experts.grouped_to_settings(model)
        | {
            "architectures": [f"{name}ForCausalLM"],
            "attention_bias": model.attention.out_bias,
            "num_key_value_heads": model.num_heads,
            "kv_lora_rank": latent.rank,
            "q_lora_rank": latent.query_rank,
            "qk_rope_head_dim": latent.rotated,
            "qk_nope_head_dim": latent.plain,
            "v_head_dim": latent.value,
        }
    )


_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def settings(model: Decoder) -> dict[str, Any]:
    """MindFormers settings besides the shared ones, under the names of config.json."""
    written = write(model)
    found = llama.settings(model) | experts.grouped_to_settings(model)
    del found["partial_rotary_factor"]
    return (
        found
        | {name: written[name] for name in _SIZES}
        | {"n_kv_heads": None, "head_dim": None, "attention_multiplier": None}
        | {"rope_interleave": written.get("rope_interleave", True)}
    )


def from_settings(given: Mapping[str, Any], architecture: str) -> Decoder:
    latent = Latent(
        rank=given["kv_lora_rank"],
        rotated=given["qk_rope_head_dim"],
        plain=given["qk_nope_head_dim"],
        value=given["v_head_dim"],
        norm=Norm("rms", _EPS),
        query_rank=given["q_lora_rank"],
        interleaved=given["rope_interleave"],
    )
    newer = architecture == "deepseek_v3"
    chosen = Experts(
        given["n_routed_experts"],
        given["num_experts_per_tok"],
        given["norm_topk_prob"],
        sigmoid=newer,
        choice_bias=newer,
        groups=given["n_group"],
        chosen_groups=given["topk_group"],
        best_of_group=2 if newer else 1,
        scale=given["routed_scaling_factor"],
        shared=given["n_shared_experts"] * given["moe_intermediate_size"],
    )
    mixture = Mixture(chosen, given["moe_intermediate_size"], range(given["first_k_dense_replace"]))
    sizes = llama.sizes_of_settings(given)
    del sizes["scale"]
    return decoder(latent, **sizes, architecture=architecture, mixture=mixture)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DeepseekSettings(llama.LlamaLikeSettings):
    """Settings of DeepSeek; intermediate_size is of layers without experts."""

    kv_lora_rank: Count  # of the latent vector that keys and values are made of
    q_lora_rank: Count | None  # of that of queries; null: these are made of x
    qk_rope_head_dim: Count  # of a head of queries and keys, with positions
    qk_nope_head_dim: Count  # and without
    v_head_dim: Count  # of a head of values
    n_routed_experts: Annotated[int, Range(2, MAX_EXPERTS)]  # of a layer
    num_experts_per_tok: Count
    n_group: Count = 1  # of experts, of which a token's are chosen from topk_group
    topk_group: Count = 1
    norm_topk_prob: bool  # a token's weights are divided by their sum
    routed_scaling_factor: Positive = 1.0  # of these weights
    n_shared_experts: Index  # that every token takes
    moe_intermediate_size: Count  # of each expert
    first_k_dense_replace: Index = 0  # first layers, which have no experts
    rope_interleave: bool = True  # files have the two of each rotation side by side

    def errors(self) -> Iterator[Error]:
        yield from super().errors()
        if self.kv_lora_rank % 2 or self.qk_rope_head_dim % 2:
            names = "kv_lora_rank", "qk_rope_head_dim"
            got = f"got {self.kv_lora_rank} and {self.qk_rope_head_dim}, expected even numbers"
            yield error(f"{' and '.join(names)}: {got}", *names)
        count, groups = self.n_routed_experts, self.n_group
        if count % groups or count // groups < 2:
            yield error(
                f"n_group: got {groups}, expected groups of two or more of the {count} experts",
                *("n_group", "n_routed_experts"),
            )
        elif self.topk_group > groups or (
            self.num_experts_per_tok > count // groups * self.topk_group
        ):
            yield error(
                f"num_experts_per_tok: got {self.num_experts_per_tok} of topk_group="
                f"{self.topk_group} groups, which have fewer",
                *("num_experts_per_tok", "topk_group", "n_group"),
            )


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Settings(DeepseekSettings):
    """Settings of DeepSeek V3 and R1."""

    type: Literal["DeepseekV3Config"] = "DeepseekV3Config"


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Settings(DeepseekSettings):
    """Settings of DeepSeek V2."""

    type: Literal["DeepseekV2Config"] = "DeepseekV2Config"


# Names of our settings in moe_config.
_MOE = {
    experts.COUNT: "n_routed_experts",
    experts.CHOSEN: "num_experts_per_tok",
    "shared_expert_num": "n_shared_experts",
}
_SAME = (
    *("first_k_dense_replace", "moe_intermediate_size", "n_group", "norm_topk_prob"),
    *("routed_scaling_factor", "topk_group"),
)


def _mindformers(section: type[DeepseekSettings], architecture: str) -> MindFormers:
    """Settings under the names of config.json; moe_config of a yaml has other ones."""
    name = section.type.removesuffix("Config")
    network, newer = f"{name}ForCausalLM", architecture == "deepseek_v3"
    # Settings of the router that the architecture fixes.
    fixed: dict[str, tuple[Any, ...]] = {
        "balance_via_topk_bias": (None, newer),
        "routing_policy": (None, "TopkRouterV2"),
        "use_gating_sigmoid": (None, newer),
        "use_shared_expert_gating": (None, False),
    }

    def claims(raw: Mapping[str, Any]) -> bool:
        return bool(network_of(raw) == network)

    def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
        own = raw["model"]["model_config"]
        names, others = {**_MOE, **{one: one for one in _SAME}}, ["topk_method"]
        if experts.moe_config(raw)[1].get("topk_method") == "greedy":
            others += ["n_group", "topk_group"]
            names = {key: one for key, one in names.items() if key not in others}
            result.assignments |= {f"{PREFIX}n_group": 1, f"{PREFIX}topk_group": 1}
        experts.translate(raw, result, name, names, fixed, others)
        # As in config.json: scores are scaled by the square of mscale_all_dim's.
        scaling = own.get("scaling_factor")
        if own.get("extend_method") == "YARN" and isinstance(scaling, Mapping):
            named = {"type": "yarn", **llama.rope_names(scaling)}
            result.assignments[f"{PREFIX}rope_scaling"] = named
        elif own.get("extend_method") not in (None, "None"):
            result.errors.append(
                f"{PREFIX}extend_method: got {show(own['extend_method'])}, expected None, or YARN"
                " with a mapping as scaling_factor"
            )

    return MindFormers(
        section,
        network,
        "llama",
        settings,
        lambda given: from_settings(given, architecture),
        model=architecture,
        hidden_act=("silu",),
        translated=frozenset({"extend_method", "scaling_factor", "moe_config"}),
        claims=claims,
        translate=translate,
    )


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """The two of each rotation are adjacent, except in some V3."""
    latent = model.attention.latent
    if parameter.role not in ("query", "latent") or latent is None or not latent.interleaved:
        return None
    import numpy as np  # not for a start that reads no weights

    before = latent.plain if parameter.role == "query" else latent.rank
    one = np.arange(before + latent.rotated)
    one[before:] = before + np.arange(latent.rotated).reshape(-1, 2).T.reshape(-1)
    heads = model.num_heads if parameter.role == "query" else 1
    found: Rows = (np.arange(heads)[:, None] * len(one) + one).reshape(-1)
    return found


def renamed(model: Decoder) -> Names:
    """Queries that come from x itself."""
    latent = model.attention.latent
    return _DIRECT if latent is not None and latent.query_rank is None else {}


_GGUF_KEYS = {
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "scoring_func": "expert_gating_func",
    **experts.GROUPED_KEYS,
    # Of a head: older files have the first two as those of the model, newer ones of what is kept.
    **{f"_{name}": f"attention.{name}_length" for name in ("key", "value")},
    **{f"_{name}_mla": f"attention.{name}_length_mla" for name in ("key", "value")},
    "_factor": "rope.scaling.factor",
    "_original": "rope.scaling.original_context_length",
    "_beta_fast": "rope.scaling.yarn_beta_fast",
    "_beta_slow": "rope.scaling.yarn_beta_slow",
    "_multiplier": "rope.scaling.yarn_log_multiplier",
}


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp has one name for V2 and V3, and a tenth of mscale_all_dim, which is mscale, too."""
    newer = given["scoring_func"] == 2  # sigmoids
    key, value = (given[f"_{name}_mla"] or given[f"_{name}"] or 0 for name in ("key", "value"))
    found: dict[str, Any] = {
        "model_type": "deepseek_v3" if newer else "deepseek_v2",
        "scoring_func": None,
        "qk_nope_head_dim": key - (given["qk_rope_head_dim"] or 0),
        "v_head_dim": value,
        "norm_topk_prob": bool(given["norm_topk_prob"]),
        "rope_scaling": None,
    }
    if given["n_group"] is None:  # of older files: those of the published models
        full = newer and given["n_routed_experts"] == 256
        found |= {"n_group": 8 if full else 1, "topk_group": 4 if full else 1}
    elif not newer:
        found["topk_method"] = _IN_GROUPS
    if given["_factor"]:
        mscale = round(10 * (given["_multiplier"] or 0), 6) or None
        found["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": given["_factor"],
            "original_max_position_embeddings": given["_original"],
            "beta_fast": given["_beta_fast"] or 32.0,
            "beta_slow": given["_beta_slow"] or 1.0,
            **({} if mscale is None else {"mscale": mscale, "mscale_all_dim": mscale}),
        }
    return found


DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    read,
    NAMES,
    write,
    _mindformers(DeepseekV3Settings, "deepseek_v3"),
    renamed=renamed,
    no_effect=experts.NO_EFFECT
    | experts.NEXT_TOKEN
    | {
        "num_key_value_heads": "keys are one latent vector",
        "pretraining_tp": KERNEL,
        "ep_size": KERNEL,
        "qk_head_dim": "the sum of its parts",
        "head_dim": "qk_rope_head_dim",
        "moe_layer_freq": "1 in all published files",
        "scoring_func": "transformers does not read it",
        "topk_method": "transformers does not read it",
        "aux_loss_alpha": "only in training",
        "seq_aux": "only in training",
    },
    stored_rows=stored_rows,
    next_token_layers=True,
)
DEEPSEEK_V2 = dataclasses.replace(
    DEEPSEEK_V3,
    name="deepseek_v2",
    read=read_v2,
    mindformers=_mindformers(DeepseekV2Settings, "deepseek_v2"),
    gguf=GGUF(_GGUF_KEYS, infer=infer_from_gguf, name="deepseek2", written=False, rows=stored_rows),
    no_effect={
        name: reason for name, reason in DEEPSEEK_V3.no_effect.items() if name != "topk_method"
    },
)
