"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, and experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from lite_runner.architectures import (
    GGUF,
    Architecture,
    Rows,
    apart,
    experts,
    llama,
    llama_like,
    qwen2_moe,
    qwen3,
)
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Name, Names, Parameter
from lite_runner.architectures.row_order import rotated_first
from lite_runner.architectures.spec import Block, Decoder, Experts, Norm, Recurrent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LINEAR = "linear_attention"
_FUSED = "blk.{}.ssm_ba"
_OURS, _LAYER = "model.layers.{}.linear_attention", "model.layers.{}.linear_attn"
NAMES: Names = {
    **qwen2_moe.NAMES,
    **{role: qwen3.NAMES[role] for role in ("query_norm", "key_norm")},
    **llama_like.POST_ATTENTION_NORM,
    "recurrent_in": Name(f"{_OURS}.in_proj", f"{_LAYER}.in_proj_qkvz", 0, gguf="blk.{}.attn_qkv"),
    "recurrent_gate": Name(
        f"{_OURS}.gate_proj", f"{_LAYER}.in_proj_qkvz", 1, gguf="blk.{}.attn_gate"
    ),
    "recurrent_beta": Name(f"{_OURS}.beta_proj", f"{_LAYER}.in_proj_ba", 0, gguf=_FUSED),
    "recurrent_decay": Name(f"{_OURS}.decay_proj", f"{_LAYER}.in_proj_ba", 1, gguf=_FUSED),
    "recurrent_taps": Name(f"{_OURS}.conv1d", f"{_LAYER}.conv1d"),
    "recurrent_log": Name(f"{_OURS}.A_log.", f"{_LAYER}.A_log."),
    "recurrent_rate": Name(f"{_OURS}.dt_bias.", f"{_LAYER}.dt_bias."),
    "recurrent_gain": Name(f"{_OURS}.norm", f"{_LAYER}.norm"),
    "recurrent_out": Name(f"{_OURS}.out_proj", f"{_LAYER}.out_proj"),
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(num_key_value_heads=2, head_dim=256, intermediate_size=5632)
    sizes = llama_like.sizes(fields, positions=32768, partial=0.25)
    layers = sizes["num_layers"]
    count, chosen = experts.counts(fields, experts=512, chosen=10)
    shared = fields.integer("shared_expert_intermediate_size", default=512)
    mixture = Mixture(
        Experts(
            count, chosen, fields.flag("norm_topk_prob", True), shared=shared, shared_gate=True
        ),
        fields.integer("moe_intermediate_size", default=512),
        experts.dense_layers(fields, layers),
    )
    return decoder(fields, architecture="qwen3_next", mixture=mixture, **sizes)


def decoder(fields: Fields, **sizes: Any) -> Decoder:
    """A decoder of delta nets and gated attention; see llama_like.decoder."""
    bias = fields.flag("attention_bias", False)
    kinds = layer_types(fields, sizes["num_layers"])
    heads = fields.integer("linear_num_value_heads", default=32)
    key_heads = fields.integer("linear_num_key_heads", default=16)
    if heads % key_heads:
        raise fields.invalid("linear_num_key_heads", key_heads, f"a divisor of the {heads} heads")
    recurrent = Recurrent(
        delta=True,
        heads=heads,
        key_heads=key_heads,
        key_dim=fields.integer("linear_key_head_dim", default=128),
        value_dim=fields.integer("linear_value_head_dim", default=128),
        kernel=fields.integer("linear_conv_kernel_dim", default=4, most=MOST_TAPS),
        norm=Norm("rms", sizes["norm_eps"]),
        groups=heads,
    )
    model = llama_like.decoder(qk_norm=True, qkv_bias=bias, out_bias=bias, **sizes)
    model = llama_like.changed(model, {"gated": True})
    return with_recurrent(model, recurrent, [kind == LINEAR for kind in kinds])


MOST_TAPS = 256  # tokens of a convolution


def with_recurrent(model: Decoder, recurrent: Recurrent, layers: list[bool]) -> Decoder:
    """The model with recurrent layers in place of some attention."""

    def change(block: Block, replaced: bool) -> Block:
        return dataclasses.replace(block, recurrent=recurrent) if replaced else block

    blocks = tuple(map(change, model.blocks, layers))
    return dataclasses.replace(model, blocks=blocks)


def layer_types(fields: Fields, layers: int) -> list[str]:
    """The token mixer of each layer."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        every = fields.integer("full_attention_interval", default=4)
        kinds = [llama.FULL if (one + 1) % every == 0 else LINEAR for one in range(layers)]
    known = (LINEAR, llama.FULL)
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        expected = f"{layers} times {' or '.join(known)}"
        raise fields.invalid("layer_types", kinds, expected)
    return kinds


def write(model: Decoder) -> dict[str, Any]:
    assert model.sparse is not None and model.sparse.experts is not None
    return (
        shared(model)
        | experts.to_settings(model)
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "shared_expert_intermediate_size": model.sparse.experts.shared,
        }
    )


def shared(model: Decoder) -> dict[str, Any]:
    """The part of config.json that is not of experts."""
    recurrent = model.recurrent
    assert recurrent is not None
    return llama_like.shared(model) | {
        "attention_bias": model.attention.qkv_bias,
        "partial_rotary_factor": llama_like.rotated_share(model),
        "linear_num_value_heads": recurrent.heads,
        "linear_num_key_heads": recurrent.key_heads,
        "linear_key_head_dim": recurrent.key_dim,
        "linear_value_head_dim": recurrent.value_dim,
        "linear_conv_kernel_dim": recurrent.kernel,
        "layer_types": [llama.FULL if one.recurrent is None else LINEAR for one in model.blocks],
    }


def attention_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Of each head its queries, then its gates; of these the rotated ones come first."""
    if parameter.role != "query":
        return rotated_first(apart)(parameter, model)
    import numpy as np

    dim = model.head_dim
    places = np.arange(model.num_heads)[:, None] * 2 * dim + np.arange(dim)
    queries = rotated_first(lambda *_: places.reshape(-1))(parameter, model)
    found: Rows = np.concatenate([np.asarray(queries), places.reshape(-1) + dim])
    return found


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Of each key head its query, its key, then values and gates of the heads that it is of; the
    same of b and a."""
    recurrent = model.recurrent
    if recurrent is None or not (parameter.role or "").startswith("recurrent"):
        return attention_rows(parameter, model)
    heads, group = recurrent.key_heads, recurrent.heads // recurrent.key_heads
    if parameter.role in ("recurrent_beta", "recurrent_decay"):
        return _parts(heads, [group, group])[parameter.role == "recurrent_decay"]
    if parameter.role not in ("recurrent_in", "recurrent_gate"):
        return None
    values = group * recurrent.value_dim
    *convolved, gates = _parts(heads, [recurrent.key_dim] * 2 + [values] * 2)
    if parameter.role == "recurrent_gate":
        return gates
    import numpy as np

    return np.concatenate(convolved)


def _parts(heads: int, sizes: list[int]) -> list[NDArray[np.int64]]:
    """The rows of each part, of which every head has some."""
    import numpy as np

    rows = np.arange(heads * sum(sizes)).reshape(heads, -1)
    return [one.reshape(-1) for one in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def recurrent_keys(heads: str, key_heads: str, key_dim: str, kernel: str) -> dict[str, str]:
    """llama.cpp's keys of a recurrent layer's sizes, by the names in config.json."""
    return {
        heads: "ssm.time_step_rank",
        key_heads: "ssm.group_count",
        key_dim: "ssm.state_size",
        kernel: "ssm.conv_kernel",
    }


KEYS = {
    **llama_like.KEYS,
    **llama_like.PARTIAL_KEYS,
    **recurrent_keys(
        *("linear_num_value_heads", "linear_num_key_heads"),
        *("linear_key_head_dim", "linear_conv_kernel_dim"),
    ),
    "linear_value_head_dim": "ssm.inner_size",
    "full_attention_interval": "full_attention_interval",
}
KEYS_OF_EXPERTS = {
    **llama_like.EXPERT_KEYS,
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


def fused_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Of b and a, which GGUF has as Hugging Face."""
    fused = parameter.role in ("recurrent_beta", "recurrent_decay")
    return stored_rows(parameter, model) if fused else None


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds of layers by their tensors; sizes that config.json has others of."""
    layers = range(given["num_hidden_layers"])
    attends = [f"blk.{layer}.attn_q.weight" in tensors for layer in layers]
    # Files of a Qwen3.5 have no width of dense layers, since all have experts.
    width = given["intermediate_size"] or given.get("moe_intermediate_size")
    return llama_like.infer_rotated_share(tensors, given) | {
        "intermediate_size": width,
        "layer_types": [llama.FULL if one else LINEAR for one in attends],
        "attention_bias": any(f"blk.{layer}.attn_q.bias" in tensors for layer in layers),
        "linear_value_head_dim": given["linear_value_head_dim"] // given["linear_num_value_heads"],
    }


QWEN3_NEXT = Architecture(
    "qwen3_next",
    read,
    NAMES,
    write,
    gguf=GGUF(
        KEYS | KEYS_OF_EXPERTS,
        infer=infer_from_gguf,
        name="qwen3next",
        written=False,
        rows=attention_rows,
        fused_rows=fused_rows,
    ),
    no_effect=experts.NO_EFFECT | {"full_attention_interval": "layer_types is beside it"},
    stored_rows=stored_rows,
    norms_less_one=True,
    next_token_layers=True,
)
