"""Phi-3 and Phi-4: a Llama with q, k and v fused, gate and up too, and maybe rotary positions on a
part of each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lite_runner.architectures import fused, llama, llama_like, llama_settings
from lite_runner.architectures.architecture import GGUF, MindFormers
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.no_effect import TRAINING
from lite_runner.architectures.spec import Decoder

_LAYER = "model.layers.{}"
_QKV, _GATE_UP = f"{_LAYER}.self_attn.qkv_proj", f"{_LAYER}.mlp.gate_up_proj"
NAMES: Names = {
    **llama_like.NAMES,
    "query": Name(f"{_LAYER}.attention.wq", _QKV, 0),
    "key": Name(f"{_LAYER}.attention.wk", _QKV, 1),
    "value": Name(f"{_LAYER}.attention.wv", _QKV, 2),
    "gate": Name(f"{_LAYER}.feed_forward.w1", _GATE_UP, 0),
    "up": Name(f"{_LAYER}.feed_forward.w3", _GATE_UP, 1),
}


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields = fields.with_defaults(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        rms_norm_eps=1e-5,
    )
    fields.neutral(attention_bias=False, mlp_bias=False)
    sizes = llama_like.sizes(fields, positions=4096, partial=1.0)
    rotary = sizes["rotary"]
    if rotary.scaling is not None:
        raise fields.fault("rope_parameters: rope_type", rotary.scaling.type, "default")
    if rotary.dims == sizes["head_dim"]:
        sizes["rotary"] = dataclasses.replace(rotary, dims=None)
    window = None
    if fields.raw.get("sliding_window") is not None:
        window = fields.integer("sliding_window")
    return llama_like.decoder(architecture="phi3", windows=(window,) * sizes["num_layers"], **sizes)


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    rotary = model.rotary
    dims = rotary.dims if rotary is not None else None
    return llama_like.shared(model) | {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": model.seq_length,
        "partial_rotary_factor": (dims or model.head_dim) / model.head_dim,
        "sliding_window": model.attention.window,
    }


def from_settings(given: Mapping[str, Any]) -> Decoder:
    """The inverse of llama_settings.settings."""
    return llama_like.decoder(architecture="phi3", **llama_settings.sizes_of_settings(given))


PHI3 = dataclasses.replace(
    llama.LLAMA,
    name="phi3",
    read=read,
    names=NAMES,
    write=write,
    mindformers=MindFormers(
        "Phi3Config", "Phi3ForCausalLM", "llama", llama_settings.settings, from_settings
    ),
    gguf=GGUF(
        llama_like.KEYS
        | {
            "hidden_size": "embedding_length",
            "num_attention_heads": "attention.head_count",
            "sliding_window": "attention.sliding_window",
        },
    ),
    no_effect={
        "embd_pdrop": TRAINING,
        "resid_pdrop": TRAINING,
        "original_max_position_embeddings": "of longrope, which is refused",
    },
    stored_rows=fused.rotated_first(fused.stacked),
)
