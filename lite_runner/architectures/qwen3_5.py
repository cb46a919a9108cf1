"""Qwen3.5: a Qwen3-Next, also without experts, whose projections have a tensor each in files."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import Architecture, llama_like, qwen3, qwen3_next
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Names, Parameter, Role, Rows
from lite_runner.architectures.spec import Decoder

_THEIRS: dict[Role, str] = {
    "recurrent_in": "in_proj_qkv",
    "recurrent_gate": "in_proj_z",
    "recurrent_beta": "in_proj_b",
    "recurrent_decay": "in_proj_a",
}
_RECURRENT: Names = {
    **{role: name for role, name in qwen3_next.NAMES.items() if role.startswith("recurrent")},
    **{
        role: dataclasses.replace(
            qwen3_next.NAMES[role],
            hugging_face=f"model.layers.{{}}.linear_attn.{theirs}",
            part=None,
        )
        for role, theirs in _THEIRS.items()
    },
}
NAMES: Names = {**qwen3.NAMES, **_RECURRENT}


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields = fields.with_defaults(num_key_value_heads=4, head_dim=256, intermediate_size=12288)
    sizes = llama_like.sizes(fields, positions=32768, partial=0.25)
    return qwen3_next.decoder(fields, architecture="qwen3_5_text", **sizes)


def read_moe(fields: Fields) -> Decoder:
    """From config.json of the one with experts in all layers."""
    fields = fields.with_defaults(num_experts=256, num_experts_per_tok=8)
    same = {"norm_topk_prob": True, "mlp_only_layers": None, "decoder_sparse_step": 1}
    return qwen3_next.read(fields.with_values(**same))


def write_moe(model: Decoder) -> dict[str, Any]:
    """config.json of the one with experts."""
    return qwen3_next.write(model) | {"architectures": ["Qwen3_5MoeForCausalLM"]}


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    return qwen3_next.shared(model) | {"architectures": ["Qwen3_5ForCausalLM"]}


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Queries and gates of attention as in a Qwen3-Next; all else as it is."""
    if parameter.role in _THEIRS:
        return None
    return qwen3_next.attention_rows(parameter, model)


QWEN3_5_TEXT = dataclasses.replace(
    qwen3_next.QWEN3_NEXT,
    name="qwen3_5_text",
    read=read,
    names=NAMES,
    write=write,
    no_effect={"full_attention_interval": "layer_types is beside it"},
    stored_rows=stored_rows,
)
QWEN3_5_MOE_TEXT = dataclasses.replace(
    QWEN3_5_TEXT,
    name="qwen3_5_moe_text",
    read=read_moe,
    names={**qwen3_next.NAMES, **_RECURRENT},
    write=write_moe,
    no_effect=qwen3_next.QWEN3_NEXT.no_effect,
)
# With images, of which the text model is read.
QWEN3_5 = Architecture("qwen3_5", read, text_of="qwen3_5_text")
QWEN3_5_MOE = Architecture("qwen3_5_moe", read_moe, text_of="qwen3_5_moe_text")
