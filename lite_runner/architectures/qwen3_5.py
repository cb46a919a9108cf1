"""Qwen3.5: a Qwen3-Next without experts, whose projections have a tensor each in files."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import llama_like, qwen3, qwen3_next
from lite_runner.architectures.architecture import Architecture
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Names, Parameter, Role, Rows
from lite_runner.architectures.spec import Decoder

_THEIRS: dict[Role, str] = {
    "recurrent_in": "in_proj_qkv",
    "recurrent_gate": "in_proj_z",
    "recurrent_beta": "in_proj_b",
    "recurrent_decay": "in_proj_a",
}
NAMES: Names = {
    **qwen3.NAMES,
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


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields = fields.with_defaults(num_key_value_heads=4, head_dim=256, intermediate_size=12288)
    sizes = llama_like.sizes(fields, positions=32768, partial=0.25)
    return qwen3_next.decoder(fields, architecture="qwen3_5_text", **sizes)


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
# With images, of which the text model is read.
QWEN3_5 = Architecture("qwen3_5", read, text_of="qwen3_5_text")
