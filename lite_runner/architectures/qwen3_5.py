"""Qwen3.5: a Qwen3-Next, also without experts, whose projections have a tensor each in files."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import GGUF, Architecture, Rows, llama_like, qwen3, qwen3_next
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Names, Parameter, Role
from lite_runner.architectures.spec import Decoder, Recurrent

_THEIRS: dict[Role, str] = {
    "recurrent_in": "in_proj_qkv",
    "recurrent_gate": "in_proj_z",
    "recurrent_beta": "in_proj_b",
    "recurrent_decay": "in_proj_a",
}
_APART: tuple[Role, ...] = ("recurrent_beta", "recurrent_decay")
_RECURRENT: Names = {
    **{role: name for role, name in qwen3_next.NAMES.items() if role.startswith("recurrent")},
    **{
        role: dataclasses.replace(
            qwen3_next.NAMES[role],
            hugging_face=f"model.layers.{{}}.linear_attn.{theirs}",
            part=None,
            gguf="" if role in _APART else qwen3_next.NAMES[role].gguf,
        )
        for role, theirs in _THEIRS.items()
    },
}
NAMES: Names = {**qwen3.NAMES, **llama_like.POST_ATTENTION_NORM, **_RECURRENT}


def read(fields: Fields) -> Decoder:
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
    return qwen3_next.shared(model) | {"architectures": ["Qwen3_5ForCausalLM"]}


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Queries and gates of attention as in a Qwen3-Next; all else as it is."""
    if parameter.role in _THEIRS:
        return None
    return qwen3_next.attention_rows(parameter, model)


def gguf_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Values' heads take turns among key heads there; and attention as in Hugging Face's files."""
    role, recurrent = parameter.role or "", model.recurrent
    if recurrent is None or not role.startswith("recurrent"):
        return stored_rows(parameter, model)
    same = recurrent.heads == recurrent.key_heads
    if same or role in ("recurrent_gain", "recurrent_out"):
        return None
    if role not in ("recurrent_in", "recurrent_taps"):
        return _by_turns(recurrent, parameter.shape[0] // recurrent.heads)
    import numpy as np

    keys = recurrent.channels - recurrent.values
    values = keys + np.asarray(_by_turns(recurrent, recurrent.value_dim))
    found: Rows = np.concatenate([np.arange(keys), values])
    return found


def gguf_columns(parameter: Parameter, model: Decoder) -> Rows | None:
    """The same of the output's inputs."""
    recurrent = model.recurrent
    if parameter.role != "recurrent_out" or recurrent is None:
        return None
    if recurrent.heads == recurrent.key_heads:  # the order is the same, and blocks stay
        return None
    return _by_turns(recurrent, recurrent.value_dim)


def _by_turns(recurrent: Recurrent, width: int) -> Rows:
    """Places of the numbers of all heads, of a `width` each."""
    import numpy as np

    turns = np.arange(recurrent.heads * width).reshape(-1, recurrent.key_heads, width)
    found: Rows = turns.swapaxes(0, 1).reshape(-1)
    return found


_GGUF = GGUF(
    qwen3_next.KEYS,
    infer=qwen3_next.infer_from_gguf,
    name="qwen35",
    written=False,
    rows=gguf_rows,
    columns=gguf_columns,
)
QWEN3_5_TEXT = dataclasses.replace(
    qwen3_next.QWEN3_NEXT,
    name="qwen3_5_text",
    read=read,
    names=NAMES,
    write=write,
    no_effect={"full_attention_interval": "layer_types is beside it"},
    stored_rows=stored_rows,
    gguf=_GGUF,
)
QWEN3_5_MOE_TEXT = dataclasses.replace(
    QWEN3_5_TEXT,
    name="qwen3_5_moe_text",
    read=read_moe,
    names={**qwen3_next.NAMES, **_RECURRENT},
    write=write_moe,
    no_effect=qwen3_next.QWEN3_NEXT.no_effect,
    gguf=dataclasses.replace(
        _GGUF, keys=qwen3_next.KEYS | qwen3_next.KEYS_OF_EXPERTS, name="qwen35moe"
    ),
)
# With images, of which the text model is read.
QWEN3_5 = Architecture("qwen3_5", read, text_of="qwen3_5_text")
QWEN3_5_MOE = Architecture("qwen3_5_moe", read_moe, text_of="qwen3_5_moe_text")
