"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v, and with windows in its later layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import llama
from lite_runner.architectures.architecture import GGUF
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder

FULL, SLIDING = "full_attention", "sliding_attention"


def read(fields: Fields) -> Decoder:
    """Of config.json."""
    sizes = llama.sizes(fields, positions=32768)
    return llama.decoder(
        architecture="qwen2", qkv_bias=True, windows=windows(fields, sizes["num_layers"]), **sizes
    )


def windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The window of each layer: layer_types says which layers have one, or the first
    max_window_layers have none."""
    fields = fields.otherwise(sliding_window=4096, max_window_layers=28)
    slides = fields.flag("use_sliding_window", False) and fields.raw["sliding_window"] is not None
    window = fields.integer("sliding_window") if slides else None
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        if window is None:
            return (None,) * layers
        first = fields.raw["max_window_layers"]
        if type(first) is not int or first < 0:
            raise fields.fault("max_window_layers", first, "an integer from 0")
        return tuple(window if layer >= first else None for layer in range(layers))
    expected = f"a list of {layers}, each {FULL}" + (f" or {SLIDING}" if window else ": no window")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.fault("layer_types", kinds, expected)
    for kind in kinds:
        if kind != FULL and (kind != SLIDING or window is None):
            raise fields.fault("layer_types", kind, expected)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def windows_written(model: Decoder) -> dict[str, Any]:
    """What `windows` reads."""
    sliding = [window is not None for window in model.windows]
    if not any(sliding):
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": max(window or 0 for window in model.windows),
        "max_window_layers": sliding.index(True),
        "layer_types": [SLIDING if slides else FULL for slides in sliding],
    }


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    return (
        llama.shared(model)
        | windows_written(model)
        | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    )


QWEN2 = dataclasses.replace(
    llama.LLAMA,
    name="qwen2",
    read=read,
    write=write,
    gguf=GGUF(llama.KEYS, told=llama.told_by_gguf),
)
