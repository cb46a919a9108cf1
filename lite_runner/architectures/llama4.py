"""Llama 4, its text model: a Llama with interleaved rotations and norms of heads without weights,
chunks of attention in the layers with positions and a temperature in those without, and in some or
all layers experts, whose inputs are scaled, and a network beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import GGUF, Architecture, apart, experts, llama_like, row_order
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import FusedExperts, Name, Names, Role
from lite_runner.architectures.spec import Block, Decoder, Experts, Norm, Temperature

_LAYER = "model.layers.{}"
_ALL = f"{_LAYER}.feed_forward.experts"
_FUSED: dict[Role, FusedExperts] = {
    "expert_gate": FusedExperts(f"{_ALL}.gate_up_proj", 0, 2, transposed=True),
    "expert_up": FusedExperts(f"{_ALL}.gate_up_proj", 1, 2, transposed=True),
    "expert_down": FusedExperts(f"{_ALL}.down_proj", 0, 1, transposed=True),
}
_EXPERTS = experts.names(
    ("feed_forward.routed_experts.router.dense", "feed_forward.router"),
    ("feed_forward.routed_experts.ffn", "feed_forward.experts"),
    ("gate_proj", "down_proj", "up_proj"),
)
_DENSE: dict[Role, str] = {"gate": "gate_proj", "down": "down_proj", "up": "up_proj"}
NAMES: Names = {
    **llama_like.NAMES,
    **{
        role: Name(llama_like.NAMES[role].mindformers, f"{_LAYER}.feed_forward.{name}")
        for role, name in _DENSE.items()
    },
    **experts.fused(_EXPERTS, _FUSED),
    **experts.shared_names("feed_forward.shared_experts", "feed_forward.shared_expert"),
}
_CHUNKED, _FULL = "chunked_attention", "full_attention"


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0
    )
    sizes = llama_like.sizes(fields, positions=131072)
    layers, width = sizes["num_layers"], sizes["intermediate_size"]
    sizes["intermediate_size"] = fields.integer("intermediate_size_mlp", default=16384)
    rotates = _rotates(fields, layers)
    count, chosen = experts.counts(fields, experts=16, chosen=1)
    mixture = Mixture(
        Experts(count, chosen, renormalized=False, sigmoid=True, scaled_inputs=True, shared=width),
        width,
        _dense(fields, layers),
    )
    bias = fields.flag("attention_bias", False)
    model = llama_like.decoder(
        architecture="llama4_text",
        qkv_bias=bias,
        out_bias=bias,
        rotary_layers=rotates,
        mixture=mixture,
        **sizes,
    )
    chunk = fields.integer("attention_chunk_size", default=8192)
    span = fields.integer("floor_scale", default=8192)
    tuned = fields.raw.get("attn_temperature_tuning") not in (False, 0)
    weight = fields.number("attn_scale", 0.1)
    temperature = Temperature(span, weight) if tuned and span <= model.seq_length else None
    normed = fields.flag("use_qk_norm", True)
    norm = Norm("rms", sizes["norm_eps"], gain=False) if normed else None

    def change(block: Block, rotated: bool) -> Block:
        kept = dataclasses.replace(
            block.attention,
            qk_norm=norm if rotated else None,
            qk_norm_late=rotated and normed,
            chunk=chunk if rotated and chunk < model.seq_length else None,
            temperature=None if rotated else temperature,
        )
        return dataclasses.replace(block, attention=kept)

    return dataclasses.replace(model, blocks=tuple(map(change, model.blocks, rotates)))


def _rotates(fields: Fields, layers: int) -> list[bool]:
    """True for each layer that has positions, and sees its own chunk alone."""
    listed = fields.raw.get("no_rope_layers")
    every = fields.integer("no_rope_layer_interval", default=4)
    if listed in (None, []):
        listed = [int((layer + 1) % every != 0) for layer in range(layers)]
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(n not in (0, 1) for n in listed)
    ):
        raise fields.invalid("no_rope_layers", listed, f"{layers} times 0 or 1")
    rotates = [one == 1 for one in listed]
    kinds = fields.raw.get("layer_types")
    expected = [_CHUNKED if one else _FULL for one in rotates]
    if kinds not in (None, expected):
        raise fields.invalid("layer_types", kinds, f"{_CHUNKED} in the layers with positions")
    return rotates


def _dense(fields: Fields, layers: int) -> list[int]:
    """Layers without experts."""
    listed = fields.raw.get("moe_layers")
    step = fields.integer("interleave_moe_layer_step", default=1)
    if listed is None:
        listed = list(range(step - 1, layers, step))
    if not isinstance(listed, list) or any(type(one) is not int for one in listed):
        raise fields.invalid("moe_layers", listed, "a list of layers, counted from 0")
    return [layer for layer in range(layers) if layer not in listed]


def write(model: Decoder) -> dict[str, Any]:
    given, blocks = experts.to_settings(model), model.blocks
    assert model.sparse is not None
    temperature = next((b.attention.temperature for b in blocks if b.attention.temperature), None)
    rotates = [int(block.attention.rotary is not None) for block in blocks]
    found = llama_like.shared(model) | {
        "architectures": ["Llama4ForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
        "intermediate_size": model.sparse.width,
        "intermediate_size_mlp": model.intermediate_size,
        "num_local_experts": given["num_experts"],
        "num_experts_per_tok": given["num_experts_per_tok"],
        "moe_layers": [n for n in range(len(blocks)) if n not in model.dense_layers],
        "no_rope_layers": rotates,
        "layer_types": [_CHUNKED if one else _FULL for one in rotates],
        "use_qk_norm": any(block.attention.qk_norm for block in blocks),
        "attn_temperature_tuning": temperature is not None,
    }
    if temperature is not None:
        found |= {"floor_scale": temperature.span, "attn_scale": temperature.weight}
    chunks = [block.attention.chunk for block in blocks if block.attention.chunk]
    return found | {"attention_chunk_size": chunks[0] if chunks else model.seq_length}


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp computes with the numbers of the published models; that with 128 experts has norms
    of heads in none of its layers."""
    return {
        "intermediate_size_mlp": given["intermediate_size_mlp"] or given["intermediate_size"],
        "use_qk_norm": given["num_local_experts"] != 128,
    }


LLAMA4_TEXT = Architecture(
    "llama4_text",
    read,
    NAMES,
    write,
    gguf=GGUF(
        llama_like.KEYS
        | llama_like.LOCAL_EXPERT_KEYS
        | {
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        infer=infer_from_gguf,
        name="llama4",
        rows=row_order.interleaved(apart),
    ),
    no_effect=experts.NO_EFFECT | {"for_llm_compression": "not read by transformers"},
    stored_rows=row_order.interleaved(apart),
)
# With images, of which the text model is read.
LLAMA4 = Architecture("llama4", read, text_of="llama4_text")
