"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import llama
from lite_runner.architectures.architecture import GGUF
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError


def read(fields: Fields) -> Decoder:
    """Of config.json."""
    sizes = llama.sizes(fields, positions=32768)
    _refuse_sliding_window(
        fields, sizes["num_layers"], fields.integer("max_position_embeddings", default=32768)
    )
    return llama.decoder(architecture="qwen2", qkv_bias=True, **sizes)


def _refuse_sliding_window(fields: Fields, layers: int, positions: int) -> None:
    if not fields.flag("use_sliding_window", False):
        return
    window = fields.integer("sliding_window", default=4096)
    kinds = fields.raw.get("layer_types")
    if isinstance(kinds, list):
        slides = "sliding_attention" in kinds
    else:
        first = fields.raw.get("max_window_layers", 28)
        if type(first) is not int:
            raise fields.fault("max_window_layers", first, "an integer")
        slides = first < layers
    if slides and window < positions:
        raise ArtifactError(
            f"{fields.where}: sliding-window attention over {window} of {positions} positions "
            "(use_sliding_window=true) is not supported",
            f"max_position_embeddings of at most {window} would not need the window",
        )


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    return llama.write(model) | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


QWEN2 = dataclasses.replace(
    llama.LLAMA,
    name="qwen2",
    read=read,
    write=write,
    gguf=GGUF(llama.KEYS, model_type=llama.model_type_in_gguf),
)
