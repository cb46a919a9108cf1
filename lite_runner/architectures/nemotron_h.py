"""Nemotron-H, and Nemotron Nano 2 and 3: layers of Mamba-2, of attention without positions, or of a
feed-forward network without gates, or of experts, alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import (
    GGUF,
    Architecture,
    experts,
    granite_hybrid,
    llama_like,
    qwen3_next,
)
from lite_runner.architectures.fields import KERNEL, TRAINING, Fields
from lite_runner.architectures.naming import Name, Names, Role
from lite_runner.architectures.spec import Block, Decoder, FeedForward, Norm, Recurrent

_LAYER = "backbone.layers.{}"
_LINEAR: dict[Role, str] = {
    **{"query": "q_proj", "key": "k_proj", "value": "v_proj", "attention_out": "o_proj"},
    **{"down": "down_proj", "up": "up_proj"},
}
_MIXER: Names = {
    **experts.names(
        ("feed_forward.router", "mixer.gate"),
        ("feed_forward.experts", "mixer.experts"),
        ("", "down_proj", "up_proj"),
    ),
    "choice_bias": Name(
        "model.layers.{}.feed_forward.router.topk_bias.",
        "model.layers.{}.mixer.gate.e_score_correction_bias.",
    ),
    **experts.shared_names("feed_forward.shared_experts", "mixer.shared_experts"),
    **{
        role: dataclasses.replace(llama_like.NAMES[role], hugging_face=f"{_LAYER}.mixer.{name}")
        for role, name in _LINEAR.items()
    },
    **{role: name for role, name in granite_hybrid.NAMES.items() if role.startswith("recurrent_")},
}


def _below(name: Name) -> Name:
    """Names of a layer's tensors, of which each layer has one mixer."""
    theirs = name.hugging_face.replace(".mamba.", ".mixer.").replace("model.", "backbone.")
    return dataclasses.replace(name, hugging_face=theirs)


NAMES: dict[Role, Name] = {
    "embedding": dataclasses.replace(
        llama_like.NAMES["embedding"], hugging_face="backbone.embeddings"
    ),
    "attention_norm": Name("model.layers.{}.attention_norm", f"{_LAYER}.norm"),
    "feed_forward_norm": Name(
        "model.layers.{}.ffn_norm", f"{_LAYER}.norm", gguf="blk.{}.attn_norm"
    ),
    **{role: _below(name) for role, name in _MIXER.items()},
    "norm": dataclasses.replace(llama_like.NAMES["norm"], hugging_face="backbone.norm_f"),
}
del NAMES["expert_gate"], NAMES["shared_gate"]
MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
_PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
_OLD = {"mamba": MAMBA, "attention": ATTENTION}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        **{"vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "layer_norm_epsilon": 1e-5},
        **{"mlp_hidden_act": "relu2"},
    )
    fields.neutral(mamba_hidden_act="silu", mamba_proj_bias=False, attention_bias=False)
    fields.neutral(n_shared_experts=1, sliding_window=0, moe_latent_size=0)
    kinds = _kinds(fields)
    epsilon = fields.number("layer_norm_epsilon")
    sized = fields.with_values(num_hidden_layers=len(kinds), rms_norm_eps=epsilon)
    sizes = llama_like.sizes(sized.with_values(hidden_act=None), positions=4096)
    model = llama_like.decoder(
        architecture="nemotron_h", rotary_layers=(False,) * len(kinds), **sizes
    )
    recurrent = _recurrent(fields, epsilon)
    dense = FeedForward(
        sizes["intermediate_size"],
        gated=False,
        bias=fields.flag("mlp_bias", False),
        activation=llama_like.read_activation(fields, "mlp_hidden_act"),
    )
    sparse = _sparse(fields, dense)
    if dense.bias and MOE in kinds:
        raise fields.invalid("mlp_bias", True, "false with experts")

    some = sparse if MOE in kinds and MLP not in kinds else dense  # in place of none

    def block(kind: str, given: Block) -> Block:
        mixes = kind in (MAMBA, ATTENTION)
        return dataclasses.replace(
            given,
            recurrent=recurrent if kind == MAMBA else None,
            feed_forward={MOE: sparse, MLP: dense}.get(kind, some),
            only="mixer" if mixes else "feed_forward",
        )

    return dataclasses.replace(model, blocks=tuple(map(block, kinds, model.blocks)))


def _kinds(fields: Fields) -> list[str]:
    key, kinds = fields.get("layers_block_type", "layer_types", "hybrid_override_pattern")
    if isinstance(kinds, str):
        kinds = [_PATTERN.get(one, one) for one in kinds]
    known = [*_PATTERN.values(), *_OLD]
    if kinds is None:
        kinds = [MAMBA, MOE, ATTENTION, MLP]
    if not isinstance(kinds, list) or not kinds or any(one not in known for one in kinds):
        raise fields.invalid(key, kinds, f"a layer or more of {', '.join(known)}")
    return [_OLD.get(str(one), str(one)) for one in kinds]


def _recurrent(fields: Fields, epsilon: float) -> Recurrent:
    heads = fields.integer("mamba_num_heads", default=128)
    groups = fields.integer("n_groups", default=8)
    if heads % groups:
        raise fields.invalid("n_groups", groups, f"a divisor of the {heads} heads")
    granite_hybrid.check_limit(fields)
    return Recurrent(
        delta=False,
        heads=heads,
        key_heads=groups,
        key_dim=fields.integer("ssm_state_size", default=128),
        value_dim=fields.integer("mamba_head_dim", default=64),
        kernel=fields.integer("conv_kernel", default=4, most=qwen3_next.MOST_TAPS),
        norm=Norm("rms", epsilon),
        groups=groups,
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
    )


def _sparse(fields: Fields, dense: FeedForward) -> FeedForward:
    given = experts.grouped(
        fields.with_values(n_shared_experts=None),
        count=8,
        chosen=2,
        groups=(1, 1),
        scale=1.0,
        width=7688,
    )
    shared = fields.integer("moe_shared_expert_intermediate_size", default=7688)
    width = fields.integer("moe_intermediate_size", default=7688)
    return dataclasses.replace(
        dense, width=width, experts=dataclasses.replace(given, shared=shared)
    )


def write(model: Decoder) -> dict[str, Any]:
    recurrent, sparse = model.recurrent, model.sparse
    found = llama_like.shared(model)
    for name in ("rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act", "num_hidden_layers"):
        del found[name]
    if recurrent is not None:
        found |= {
            "mamba_num_heads": recurrent.heads,
            "mamba_head_dim": recurrent.value_dim,
            "n_groups": recurrent.key_heads,
            "ssm_state_size": recurrent.key_dim,
            "conv_kernel": recurrent.kernel,
            "use_conv_bias": recurrent.conv_bias,
            "use_bias": recurrent.bias,
        }
    if sparse is not None and sparse.experts is not None:
        grouped = experts.grouped_to_settings(model)
        grouped["n_shared_experts"] = 1
        found |= {name: one for name, one in grouped.items() if name != "first_k_dense_replace"}
        found["moe_shared_expert_intermediate_size"] = sparse.experts.shared
    networks = [one.feed_forward for one in model.blocks]
    dense = next((one for one in networks if one.experts is None), networks[0])
    return found | {
        "architectures": ["NemotronHForCausalLM"],
        "intermediate_size": dense.width,
        "layers_block_type": [_kind(one) for one in model.blocks],
        "layer_norm_epsilon": model.norm_eps,
        "mlp_hidden_act": llama_like.activation_name(model.feed_forward.function),
        "mlp_bias": model.feed_forward.bias,
    }


def _kind(block: Block) -> str:
    if block.only == "mixer":
        return ATTENTION if block.recurrent is None else MAMBA
    return MLP if block.feed_forward.experts is None else MOE


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds of layers, and biases, by their tensors; sizes that other layers have not."""

    def kind(layer: int) -> str:
        tells = {"ssm_in": MAMBA, "attn_q": ATTENTION, "ffn_gate_inp": MOE}
        there = (one for name, one in tells.items() if f"blk.{layer}.{name}.weight" in tensors)
        return next(there, MLP)

    kinds = list(map(kind, range(given["num_hidden_layers"])))

    def biased(what: str, name: str) -> bool:
        return what in kinds and f"blk.{kinds.index(what)}.{name}.bias" in tensors

    widest = {  # None: no layer has any
        name: max(given[name]) if isinstance(given[name], list) else given[name] or None
        for name in ("num_key_value_heads", "intermediate_size")
    }
    widest["intermediate_size"] = widest["intermediate_size"] or given["moe_intermediate_size"]
    return widest | {
        "layers_block_type": kinds,
        "mamba_head_dim": given["mamba_head_dim"] // given["mamba_num_heads"],
        "use_conv_bias": biased(MAMBA, "ssm_conv1d"),
        "use_bias": biased(MAMBA, "ssm_in"),
        "mlp_bias": biased(MLP, "ffn_up"),
        "partial_rotary_factor": None,  # there are no positions
    }


NEMOTRON_H = Architecture(
    "nemotron_h",
    read,
    NAMES,
    write,
    gguf=GGUF(
        llama_like.KEYS
        | llama_like.PARTIAL_KEYS
        | experts.GROUPED_KEYS
        | qwen3_next.recurrent_keys("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel")
        | {
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
            "mamba_head_dim": "ssm.inner_size",
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        infer=infer_from_gguf,
        also=("nemotron_h_moe",),
        written=False,
        rows=granite_hybrid.gguf_rows,
        fused_rows=granite_hybrid.fused_rows,
    ),
    no_effect=dict.fromkeys(
        ("time_step_floor", "time_step_max", "rescale_prenorm_residual", "expand"), TRAINING
    )
    | experts.NO_EFFECT
    # transformers bounds the rates of a prompt by it, and not those of a step; nobody else does.
    | {"time_step_min": "of rates as they are initialized"}
    | {
        "num_hidden_layers": "the list of layers tells",
        "mtp_layers_block_type": "of layers for multi-token prediction",
        "mtp_hybrid_override_pattern": "of layers for multi-token prediction",
        "num_logits_to_keep": "what a Python call returns",
        **dict.fromkeys(
            (
                *("chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "residual_in_fp32"),
                "moe_shared_expert_overlap",
            ),
            KERNEL,
        ),
        **experts.NEXT_TOKEN,
    },
    stored_rows=granite_hybrid.mamba_rows,
    next_token_layers=True,
)
