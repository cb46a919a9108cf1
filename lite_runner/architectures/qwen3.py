"""Qwen3: a Llama with RMSNorm on each query and key head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, llama, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Names
from lite_runner.architectures.settings import PREFIX, Translation
from lite_runner.architectures.spec import Decoder
from lite_runner.records import dataclass

NAMES: Names = {**llama_like.NAMES, **llama_like.QUERY_KEY_NORMS}


def decoder(**sizes: Any) -> Decoder:
    return llama_like.decoder(architecture="qwen3", qk_norm=True, **sizes)


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=32)
    sizes = llama_like.sizes(fields, positions=32768)
    bias = fields.flag("attention_bias", False)
    return decoder(
        qkv_bias=bias,
        out_bias=bias,
        windows=llama.read_windows(fields, sizes["num_layers"]),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    return (
        llama_like.shared(model)
        | llama.windows_to_settings(model)
        | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": model.attention.qkv_bias}
    )


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """Settings that MindFormers has under Hugging Face's names, and a head that is untied."""
    given = raw["model"]["model_config"]
    if given.get("attention_bias") is not None:
        for name in ("qkv_has_bias", "attn_proj_has_bias"):
            result.assignments[f"{PREFIX}{name}"] = given["attention_bias"]
    if given.get("untie_embeddings_and_output_weights") is not None:
        untied = bool(given["untie_embeddings_and_output_weights"])
        result.assignments[f"{PREFIX}tie_word_embeddings"] = not untied
    if isinstance(scaling := given.get("rope_scaling"), Mapping):
        result.assignments[f"{PREFIX}rope_scaling"] = llama.rope_names(scaling)


# Differences of MindFormers' classes of Qwen3, with experts and without, from its LlamaConfig.
MINDFORMERS: dict[str, Any] = {
    "hidden_act": ("silu", "swiglu"),
    "translated": frozenset({"attention_bias", "untie_embeddings_and_output_weights"}),
    "translate": translate,
}


@dataclass(frozen=True, kw_only=True)
class Qwen3Settings(llama.LlamaLikeSettings):
    """Settings of Qwen3."""

    type: Literal["Qwen3Config"] = "Qwen3Config"


QWEN3 = dataclasses.replace(
    llama.LLAMA,
    name="qwen3",
    read=read,
    names=NAMES,
    write=write,
    mindformers=llama.mindformers(
        Qwen3Settings, "Qwen3ForCausalLM", "qwen3_0.6b", decoder, **MINDFORMERS
    ),
    gguf=GGUF(llama_like.KEYS, flags=llama_like.BIAS_FLAG, also=("qwen3vl",)),
)
# Models that read images, of which the text model is read.
QWEN3_VL = Architecture("qwen3_vl", read, text_of="qwen3")
