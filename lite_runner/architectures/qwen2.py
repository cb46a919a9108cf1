"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v, and sliding windows in its later layers."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import GGUF, Architecture, llama, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder


def read(fields: Fields) -> Decoder:
    fields.neutral(use_mrope=False)  # DeepSeek-R1-Distill-Qwen has it
    sizes = llama_like.sizes(fields, positions=32768)
    return llama_like.decoder(
        architecture="qwen2",
        qkv_bias=True,
        windows=llama.read_windows(fields, sizes["num_layers"]),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    return (
        llama_like.shared(model)
        | llama.windows_to_settings(model)
        | {"architectures": ["Qwen2ForCausalLM"]}
    )


QWEN2 = dataclasses.replace(
    llama.LLAMA,
    name="qwen2",
    read=read,
    write=write,
    gguf=GGUF(llama_like.KEYS, infer=llama.infer_from_gguf, also=("qwen2vl",)),
)
# Models that read images, of which the text model is read.
QWEN2_VL = Architecture("qwen2_vl", read, text_of="qwen2")
QWEN2_5_VL = dataclasses.replace(QWEN2_VL, name="qwen2_5_vl")
