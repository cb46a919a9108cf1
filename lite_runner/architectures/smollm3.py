"""SmolLM3: a Llama in which some layers, usually every fourth, have no positions."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from lite_runner.architectures import GGUF, llama, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        num_key_value_heads=4, rope_theta=2000000.0, tie_word_embeddings=True, sliding_window=None
    )
    sizes = llama_like.sizes(fields, positions=32768)
    layers = sizes["num_layers"]
    rotary_layers = _rotary_layers(fields, layers)
    if fields.raw.get("layer_types") is None:  # a window is for the layers without positions
        slides = fields.flag("use_sliding_window", False) and fields.raw["sliding_window"]
        kinds = [llama.FULL if one or not slides else llama.SLIDING for one in rotary_layers]
        fields = fields.with_values(layer_types=kinds)
    return llama_like.decoder(
        architecture="smollm3",
        **llama_like.read_biases(fields),
        rotary_layers=rotary_layers,
        windows=llama.read_windows(fields, layers),
        **sizes,
    )


def _rotary_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Layers with rotary positions; transformers calls the list of these 1 and 0
    no_rope_layers."""
    listed = fields.raw.get("no_rope_layers")
    if listed is None:
        every = fields.integer("no_rope_layer_interval", default=4)
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if (
        not isinstance(listed, list)
        or len(listed) < layers
        or any(type(one) is not int or one not in (0, 1) for one in listed)
    ):
        raise fields.invalid("no_rope_layers", listed, f"a list of {layers}, each 1 or 0")
    return tuple(one == 1 for one in listed[:layers])


def write(model: Decoder) -> dict[str, Any]:
    return (
        llama_like.shared(model)
        | llama.windows_to_settings(model)
        | {
            "architectures": ["SmolLM3ForCausalLM"],
            **llama_like.biases(model),
            "no_rope_layers": llama.no_rope_layers(model),
        }
    )


def settings(model: Decoder) -> dict[str, Any]:
    """MindFormers settings besides the shared ones, with no_rope_layers as in config.json."""
    listed = llama.no_rope_layers(model)
    return llama.settings(model) | {"no_rope_layers": listed}


SMOLLM3 = dataclasses.replace(
    llama.LLAMA,
    name="smollm3",
    read=read,
    write=write,
    mindformers=llama.mindformers(
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        "smollm3_3b",
        partial(llama_like.decoder, architecture="smollm3"),
        settings,
    ),
    gguf=GGUF(llama_like.KEYS, permuted=True, flags=llama_like.BIAS_FLAGS),
)
