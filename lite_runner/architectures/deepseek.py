"""DeepSeek V2, V3 and R1, Moonlight: latent attention, experts in groups, a network beside them,
and dense layers first. V3's experts are chosen by sigmoids and a bias, V2's by a softmax."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import experts, llama_like
from lite_runner.architectures.architecture import Architecture
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Name, Names, Parameter, Rows
from lite_runner.architectures.spec import Decoder, Latent, Norm, Rotary

_OURS, _LAYER = "model.layers.{}.attention", "model.layers.{}.self_attn"
_LATENT: Names = {
    "latent_query": Name(f"{_OURS}.q2l_proj", f"{_LAYER}.q_a_proj"),
    "latent_query_norm": Name(f"{_OURS}.lq_norm", f"{_LAYER}.q_a_layernorm"),
    "query": Name(f"{_OURS}.l2q_proj", f"{_LAYER}.q_b_proj"),
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
    return decoder(fields, "deepseek_v3", mixture, interleaved=fields.flag("rope_interleave", True))


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
    return decoder(fields, "deepseek_v2", mixture)


def decoder(
    fields: Fields, architecture: str, mixture: Mixture, *, interleaved: bool = True
) -> Decoder:
    """A decoder with latent attention."""
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
    rotary: Rotary = sizes["rotary"]
    scale, scaling = (latent.plain + latent.rotated) ** -0.5, rotary.scaling
    if scaling is not None and scaling.mscale_all_dim:
        from lite_runner.architectures.positions import yarn_mscale  # imports NumPy

        scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    sizes |= {
        "rotary": dataclasses.replace(rotary, dims=latent.rotated),
        "head_dim": latent.rank + latent.rotated,
        "n_kv_heads": 1,
    }
    bias = fields.flag("attention_bias", False)
    model = llama_like.decoder(
        architecture=architecture,
        qkv_bias=bias,
        out_bias=bias,
        scale=scale,
        mixture=mixture,
        **sizes,
    )
    return llama_like.changed(model, {"latent": latent})


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
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


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """The two of each rotation lie side by side, but for some V3."""
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


DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    read,
    NAMES,
    write,
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
    no_effect={
        name: reason for name, reason in DEEPSEEK_V3.no_effect.items() if name != "topk_method"
    },
)
