"""Phi-3 and Phi-4: a Llama with q, k and v fused, gate and up too, maybe rotary positions on a part
of each head, and maybe LongRoPE."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from functools import partial
from typing import Any

from lite_runner.architectures import GGUF, apart, llama, llama_like, row_order, stacked
from lite_runner.architectures.fields import TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
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


_ORIGINAL = 4096  # default of original_max_position_embeddings


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=32,
        rms_norm_eps=1e-5,
        original_max_position_embeddings=_ORIGINAL,
    )
    fields.neutral(
        attention_bias=False,
        mlp_bias=False,
        lm_head_bias=False,
        full_attn_mod=1,
        interpolate_factor=1,
    )
    fields.integer("original_max_position_embeddings", default=_ORIGINAL)
    sizes = llama_like.sizes(_with_longrope(fields), positions=4096, partial=1.0)
    rotary = sizes["rotary"]
    if rotary.scaling is not None and rotary.scaling.type != "longrope":
        raise fields.invalid(
            "rope_parameters: rope_type", rotary.scaling.type, "default or longrope"
        )
    if rotary.dims == sizes["head_dim"]:
        sizes["rotary"] = dataclasses.replace(rotary, dims=None)
    window = fields.optional_integer("sliding_window")
    if window is not None and window >= sizes["seq_length"]:
        window = None  # of published models with long contexts: it hides nothing
    return llama_like.decoder(architecture="phi3", windows=(window,) * sizes["num_layers"], **sizes)


def _with_longrope(fields: Fields) -> Fields:
    """Files have LongRoPE under its earlier names too; transformers reads "yarn" as one of them."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.raw.get(key)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            fields = fields.with_values(**{key: rope | {"rope_type": "longrope"}})
        # Of Phi-3-small, whose network is another one.
        fields.section(key).neutral(short_mscale=None, long_mscale=None)
    return fields


def write(model: Decoder) -> dict[str, Any]:
    rotary = model.rotary
    shared = llama_like.shared(model)
    original = model.seq_length
    if rotary is not None and rotary.scaling is not None:
        # transformers 4 takes no more than type, short_factor and long_factor.
        original = rotary.scaling.original_seq_length
        scaling = dict(shared["rope_scaling"])
        scaling["type"] = scaling.pop("rope_type")
        del scaling["original_max_position_embeddings"]
        if scaling["factor"] == model.seq_length / original:
            del scaling["factor"]
        shared["rope_scaling"] = scaling
    return shared | {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": original,
        "partial_rotary_factor": llama_like.rotated_share(model),
        "sliding_window": model.attention.window,
    }


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The rotated part of a head as a fraction; a window of 0 stands for none."""
    head_dim = given["hidden_size"] // given["num_attention_heads"]
    return {
        "partial_rotary_factor": (given["partial_rotary_factor"] or head_dim) / head_dim,
        "sliding_window": given["sliding_window"] or None,
    }


PHI3 = dataclasses.replace(
    llama.LLAMA,
    name="phi3",
    read=read,
    names=NAMES,
    write=write,
    mindformers=llama.mindformers(
        "Phi3Config", "Phi3ForCausalLM", "phi4", partial(llama_like.decoder, architecture="phi3")
    ),
    gguf=GGUF(
        llama_like.KEYS
        | {
            "hidden_size": "embedding_length",
            "num_attention_heads": "attention.head_count",
            "sliding_window": "attention.sliding_window",
            "original_max_position_embeddings": "rope.scaling.original_context_length",
            "partial_rotary_factor": "rope.dimension_count",
        },
        infer=infer_from_gguf,
        rows=row_order.rotated_first(apart),
    ),
    no_effect={"embd_pdrop": TRAINING, "resid_pdrop": TRAINING},
    stored_rows=row_order.rotated_first(stacked),
)
