"""StableLM: a Llama with LayerNorm and rotary positions on a part of each head."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import llama_like, naming
from lite_runner.architectures.architecture import Architecture
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder, Norm


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields = fields.with_defaults(
        num_key_value_heads=32,
    )
    fields.neutral(qk_layernorm=False)  # a tensor of each head
    epsilon = fields.number("layer_norm_eps", 1e-5)
    same = fields.with_values(rms_norm_eps=epsilon)
    model = llama_like.decoder(
        architecture="stablelm",
        qkv_bias=fields.flag("use_qkv_bias", False),
        **llama_like.sizes(same, positions=4096, partial=0.25),
    )
    norm, parallel = Norm("layer", epsilon), fields.flag("use_parallel_residual", False)
    model = llama_like.changed(model, norm=norm, parallel=parallel, shared_norm=parallel)
    return dataclasses.replace(model, norm=norm)


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    found = llama_like.shared(model)
    del found["rms_norm_eps"], found["head_dim"]
    return found | {
        "architectures": ["StableLmForCausalLM"],
        "layer_norm_eps": model.norm_eps,
        "partial_rotary_factor": llama_like.rotated_share(model),
        "use_qkv_bias": model.attention.qkv_bias,
        "use_parallel_residual": model.blocks[0].parallel,
    }


STABLELM = Architecture(
    "stablelm",
    read,
    llama_like.NAMES,
    write,
    stored_rows=naming.rotated_first(naming.apart),
)
