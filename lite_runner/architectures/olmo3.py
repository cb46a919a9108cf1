"""OLMo 3: an OLMo 2 with a sliding window in three of four layers, where positions are not
scaled."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import Architecture, llama, olmo2
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.gemma3 import ropes
from lite_runner.architectures.llama_like import shared, sizes
from lite_runner.architectures.spec import Decoder, Rotary

_THETA = 500000.0


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(rms_norm_eps=1e-5, sliding_window=4096, rope_theta=_THETA)
    rope, local = ropes(fields, fields.number("rope_theta"))
    found = sizes(fields, positions=2048, rope=rope)
    bias = fields.flag("attention_bias", False)
    return olmo2.decoder(
        architecture="olmo3",
        qkv_bias=bias,
        out_bias=bias,
        local_rotary=Rotary(local),
        windows=llama.read_periodic_windows(fields, found["num_layers"], 4),
        **found,
    )


def write(model: Decoder) -> dict[str, Any]:
    found = shared(model)
    rope = {"rope_type": "default"} | (found.pop("rope_scaling") or {})
    theta = {"rope_theta": found.pop("rope_theta")}
    local = next((one.theta for one in model.rotaries if one != model.rotary), theta["rope_theta"])
    return found | {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
        **llama.layer_types(model, 4096),
        "rope_parameters": {
            llama.FULL: rope | theta,
            llama.SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


OLMO3 = Architecture("olmo3", read, olmo2.NAMES, write)
