"""Mistral: a Llama with the same sliding window in every layer, or none."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import llama, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(num_key_value_heads=8, sliding_window=4096)
    sizes = llama_like.sizes(fields, positions=131072)
    window = fields.optional_integer("sliding_window")
    return llama_like.decoder(
        architecture="mistral", windows=(window,) * sizes["num_layers"], **sizes
    )


def write(model: Decoder) -> dict[str, Any]:
    return llama_like.shared(model) | {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": model.attention.window,
    }


MISTRAL = dataclasses.replace(llama.LLAMA, name="mistral", read=read, write=write, gguf=None)
