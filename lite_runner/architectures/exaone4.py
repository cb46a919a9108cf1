"""EXAONE 4: a Qwen3 with norms behind attention and feed-forward in place of those before, maybe
with a sliding window in three of four layers, and positions in these alone."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import GGUF, Architecture, llama, llama_like, olmo2
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096, sliding_window_pattern=4
    )
    sizes = llama_like.sizes(fields, positions=2048)
    layers, kinds = sizes["num_layers"], fields.raw.get("layer_types")
    period = fields.raw["sliding_window_pattern"]  # "LLLG" beside layer_types
    if fields.raw["sliding_window"] is None:
        kinds = [llama.FULL] * layers
    elif kinds is None:
        if type(period) is not int or period < 1:
            raise fields.invalid("sliding_window_pattern", period, "an integer from 1")
        kinds = llama.periodic(layers, period)
    fields = fields.with_values(layer_types=kinds, use_sliding_window=True)
    windows = llama.read_windows(fields, layers)
    whole = fields.raw["sliding_window"] is None
    return llama_like.decoder(
        architecture="exaone4",
        norms="after",
        qk_norm=True,
        local_rotary=sizes["rotary"],
        windows=windows,
        rotary_layers=[whole or window is not None for window in windows],
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    kinds = llama.layer_types(model, None)
    return llama_like.shared(model) | kinds | {"architectures": ["Exaone4ForCausalLM"]}


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers, of which llama.cpp lists those with a window."""
    slides = given["slides"]
    if not given["sliding_window"] or not isinstance(slides, list):
        return {"sliding_window": given["sliding_window"] or None}
    kinds = (llama.FULL, llama.SLIDING)
    return {"layer_types": [kinds[bool(one)] for one in slides]}


EXAONE4 = Architecture(
    "exaone4",
    read,
    olmo2.NAMES,
    write,
    gguf=GGUF(
        llama_like.KEYS
        | {
            "sliding_window": "attention.sliding_window",
            "slides": "attention.sliding_window_pattern",
        },
        infer=infer_from_gguf,
    ),
)
