"""Granite 4 hybrid: a Granite with Mamba-2 in most layers, and attention without positions."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import (
    GGUF,
    Architecture,
    Rows,
    experts,
    granite,
    granite_moe,
    llama_like,
)
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Name, Names, Parameter, Role
from lite_runner.architectures.qwen3_next import MOST_TAPS, recurrent_keys, with_recurrent
from lite_runner.architectures.spec import Decoder, Experts, Norm, Recurrent

_OURS, _LAYER = "model.layers.{}.mamba", "model.layers.{}.mamba"
_MLP, _THEIRS = "model.layers.{}.feed_forward.shared_mlp", "model.layers.{}.shared_mlp"
_IN: tuple[Role, ...] = ("recurrent_gate", "recurrent_in", "recurrent_decay")  # as files have them
_FUSED = "blk.{}.ssm_in"
_IN_ONE, _OUT = f"{_THEIRS}.input_linear", f"{_THEIRS}.output_linear"
NAMES: Names = {
    **granite_moe.NAMES,
    # Of a layer without experts, and of one with them.
    "gate": Name(f"{_MLP}.w1", _IN_ONE, 0, gguf="blk.{}.ffn_gate"),
    "down": Name(f"{_MLP}.w2", _OUT),
    "up": Name(f"{_MLP}.w3", _IN_ONE, 1),
    "shared_gate": Name(f"{_MLP}.w1", _IN_ONE, 0),
    "shared_down": Name(f"{_MLP}.w2", _OUT),
    "shared_up": Name(f"{_MLP}.w3", _IN_ONE, 1),
    "recurrent_gate": Name(f"{_OURS}.gate_proj", f"{_LAYER}.in_proj", 0, gguf=_FUSED),
    "recurrent_in": Name(f"{_OURS}.in_proj", f"{_LAYER}.in_proj", 1),
    "recurrent_decay": Name(f"{_OURS}.rate_proj", f"{_LAYER}.in_proj", 2, gguf=_FUSED),
    "recurrent_taps": Name(f"{_OURS}.conv1d", f"{_LAYER}.conv1d"),
    "recurrent_log": Name(f"{_OURS}.A_log.", f"{_LAYER}.A_log."),
    "recurrent_rate": Name(f"{_OURS}.dt_bias.", f"{_LAYER}.dt_bias."),
    "recurrent_skip": Name(f"{_OURS}.D.", f"{_LAYER}.D."),
    "recurrent_gain": Name(f"{_OURS}.norm", f"{_LAYER}.norm"),
    "recurrent_out": Name(f"{_OURS}.out_proj", f"{_LAYER}.out_proj"),
}
_RECURRENT, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(attention_multiplier=1.0, intermediate_size=11008)
    sizes = llama_like.sizes(fields, positions=2048)
    layers, bias = sizes["num_layers"], fields.flag("attention_bias", False)
    fields.choice("position_embedding_type", ("rope", "nope"))
    rotates = fields.raw.get("position_embedding_type") == "rope"
    wide = fields.integer("shared_intermediate_size", default=1024)
    mixture = None
    if fields.index("num_local_experts", 8):
        count, chosen = experts.counts(fields, experts=8, chosen=2)
        mixture = Mixture(Experts(count, chosen, shared=wide), sizes["intermediate_size"])
    model = llama_like.decoder(
        architecture="granitemoehybrid",
        qkv_bias=bias,
        out_bias=bias,
        rotary_layers=(rotates,) * layers,
        mixture=mixture,
        **granite.multipliers(fields),
        **sizes | {"intermediate_size": wide},
    )
    return with_recurrent(model, _recurrent(fields, sizes), _layers(fields, layers))


def _recurrent(fields: Fields, sizes: dict[str, Any]) -> Recurrent:
    values = fields.integer("mamba_expand", default=2) * sizes["hidden_size"]
    heads = fields.integer("mamba_n_heads", default=128)
    groups = fields.integer("mamba_n_groups", default=1)
    if values % heads:
        raise fields.invalid("mamba_n_heads", heads, f"a divisor of {values}, as mamba_expand says")
    if heads % groups:
        raise fields.invalid("mamba_n_groups", groups, f"a divisor of the {heads} heads")
    if fields.raw.get("mamba_d_head") not in (None, "auto", values // heads):
        expected = f"{values // heads}, so that {heads} heads make {values}"
        raise fields.invalid("mamba_d_head", fields.raw["mamba_d_head"], expected)
    check_limit(fields)
    return Recurrent(
        delta=False,
        heads=heads,
        key_heads=groups,
        key_dim=fields.integer("mamba_d_state", default=256),
        value_dim=values // heads,
        kernel=fields.integer("mamba_d_conv", default=4, most=MOST_TAPS),
        norm=Norm("rms", sizes["norm_eps"]),
        groups=groups,
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False),
    )


def check_limit(fields: Fields) -> None:
    """Raise ArtifactError if rates have a bound, which no implementation applies."""
    limit = fields.raw.get("time_step_limit")
    # As transformers writes it, and Python.
    if limit not in (None, [0.0, {"__float__": "Infinity"}], [0.0, float("inf")]):
        raise fields.invalid("time_step_limit", limit, "[0, Infinity]")


def _layers(fields: Fields, layers: int) -> list[bool]:
    """True for each layer that is recurrent."""
    key, kinds = fields.get("layer_types", "layers_block_type")
    kinds = [_RECURRENT[0]] * layers if kinds is None else kinds
    known = (*_RECURRENT, *_ATTENTION)
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise fields.invalid(key, kinds, f"{layers} times mamba or attention")
    return [kind in _RECURRENT for kind in kinds]


def write(model: Decoder) -> dict[str, Any]:
    recurrent, sparse = model.recurrent, model.sparse
    assert recurrent is not None
    found = granite.shared(model)
    mixture: dict[str, Any] = {"num_local_experts": 0}
    wide = model.intermediate_size
    if sparse is not None and sparse.experts is not None:
        given, wide = experts.to_settings(model), sparse.experts.shared
        mixture = {
            "num_local_experts": given["num_experts"],
            "num_experts_per_tok": given["num_experts_per_tok"],
        }
    rotates = any(one.attention.rotary is not None for one in model.blocks)
    return (
        found
        | mixture
        | {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "shared_intermediate_size": wide,
            "position_embedding_type": "rope" if rotates else "nope",
            "layer_types": [
                (_ATTENTION if one.recurrent is None else _RECURRENT)[0] for one in model.blocks
            ],
            "mamba_expand": recurrent.values // model.hidden_size,
            "mamba_n_heads": recurrent.heads,
            "mamba_d_head": recurrent.value_dim,
            "mamba_n_groups": recurrent.key_heads,
            "mamba_d_state": recurrent.key_dim,
            "mamba_d_conv": recurrent.kernel,
            "mamba_conv_bias": recurrent.conv_bias,
            "mamba_proj_bias": recurrent.bias,
        }
    )


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Gate over up; see mamba_rows."""
    role = parameter.role
    if role in ("gate", "up", "shared_gate", "shared_up"):
        start = parameter.shape[0] if role.endswith("up") else 0
        return slice(start, start + parameter.shape[0])
    return mamba_rows(parameter, model)


def mamba_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Gates, then values, keys and queries, then rates."""
    role, recurrent = parameter.role, model.recurrent
    if recurrent is None or role not in (*_IN, "recurrent_taps"):
        return None
    import numpy as np

    values, keys = recurrent.values, recurrent.key_heads * recurrent.key_dim
    value, key, query = np.split(np.arange(recurrent.channels), [values, values + keys])
    convolved = np.concatenate([query, key, value])
    if role == "recurrent_taps":
        return convolved
    if role == "recurrent_in":
        return convolved + values
    start = 0 if role == "recurrent_gate" else values + recurrent.channels
    return slice(start, start + parameter.shape[0])


def gguf_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Of the convolution, which is alone in a tensor of GGUF as of Hugging Face."""
    return mamba_rows(parameter, model) if parameter.role == "recurrent_taps" else None


def fused_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Of what is fused in both."""
    return mamba_rows(parameter, model) if parameter.role in _IN else None


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds of layers by their tensors; sizes that config.json has others of."""
    layers = range(given["num_hidden_layers"])
    mamba = [f"{_FUSED.format(layer)}.weight" in tensors for layer in layers]
    kv_heads = given["num_key_value_heads"]
    counts = kv_heads if isinstance(kv_heads, list) else [kv_heads]
    found = granite.infer_from_gguf(tensors, given) | {
        "layer_types": [(_RECURRENT if one else _ATTENTION)[0] for one in mamba],
        "num_key_value_heads": max(counts),
        "attention_bias": any(f"blk.{layer}.attn_q.bias" in tensors for layer in layers),
        "mamba_conv_bias": f"blk.{mamba.index(True)}.ssm_conv1d.bias" in tensors,
        "mamba_proj_bias": f"blk.{mamba.index(True)}.ssm_in.bias" in tensors,
        "mamba_expand": given["mamba_expand"] // given["hidden_size"],
        "num_local_experts": given["num_local_experts"] or 0,
        # As llama.cpp decides it.
        "position_embedding_type": "nope" if given["position_embedding_type"] is False else "rope",
    }
    if not given["num_local_experts"]:
        found["shared_intermediate_size"] = given["intermediate_size"]
    return found


GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    read,
    NAMES,
    write,
    gguf=GGUF(
        granite.KEYS
        | llama_like.LOCAL_EXPERT_KEYS
        | recurrent_keys("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
        | {
            "shared_intermediate_size": "expert_shared_feed_forward_length",
            "position_embedding_type": "rope.scaling.finetuned",
            "mamba_expand": "ssm.inner_size",
        },
        permuted=True,
        flags=llama_like.BIAS_FLAGS,
        infer=infer_from_gguf,
        name="granitehybrid",
        written=False,
        rows=gguf_rows,
        fused_rows=fused_rows,
    ),
    no_effect=experts.NO_EFFECT
    | {
        "mamba_chunk_size": "of the reference's way to compute",
        "normalization_function": "rmsnorm in all files",
        "init_method": "only in training",
    },
    stored_rows=stored_rows,
)
