"""Llama 1 to 3 and SmolLM2."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, llama_like, llama_settings
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.settings import PREFIX, Translation, network_of
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import show
from lite_runner.records import dataclass


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields.neutral(rope_interleaved=False)  # SmolLM2 has it
    given = llama_like.sizes(fields, positions=2048)
    return llama_like.decoder(architecture="llama", **llama_like.read_biases(fields), **given)


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    return llama_like.shared(model) | {
        "architectures": ["LlamaForCausalLM"],
        **llama_like.biases(model),
    }


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF writes Mixtral as llama with experts, Mistral as llama with a sliding window, and some
    Qwen2 as llama with biases on q, k and v only."""
    if given.get("num_experts"):
        return {"model_type": "mixtral"}
    if given.get("sliding_window"):
        return {"model_type": "mistral"}
    qkv, out = (f"blk.0.attn_{name}.bias" in tensors for name in ("q", "output"))
    if qkv and not out:
        return {"model_type": "qwen2"}
    mlp_bias = "blk.0.ffn_up.bias" in tensors
    return {"model_type": "llama", "attention_bias": qkv and out, "mlp_bias": mlp_bias}


_BOOSTED = "LlmBoostForCausalLM"  # the same, computed by Ascend's ATB library in MindFormers


def claims(raw: Mapping[str, Any]) -> bool:
    """True if a yaml of MindFormers is of that network."""
    return bool(network_of(raw) == _BOOSTED)


def _boosted(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """The models of that network are a Llama and a Qwen2, which has biases of q, k and v."""
    llama_settings.translate(raw, defaults, result)
    if claims(raw):
        name = raw["model"]["model_config"].get("boost_model_name")
        if name not in ("Llama", "Qwen"):
            expected = "expected 'Llama' or 'Qwen'"
            result.errors.append(f"{PREFIX}boost_model_name: got {show(name)}, {expected}")
        result.assignments[f"{PREFIX}type"] = LlamaSettings.type
        result.assignments.setdefault(f"{PREFIX}qkv_has_bias", name == "Qwen")


@dataclass(frozen=True, kw_only=True)
class LlamaSettings(llama_settings.LlamaLikeSettings):
    """Settings of Llama, Qwen2, Mistral and SmolLM2."""

    type: Literal["LlamaConfig"] = "LlamaConfig"


LLAMA = Architecture(
    "llama",
    read,
    llama_like.NAMES,
    write,
    llama_settings.mindformers(
        LlamaSettings,
        "LlamaForCausalLM",
        "llama2_7b",
        llama_like.decoder,
        also=("ParallelLlamaForCausalLM", _BOOSTED),
        claims=claims,
        unread=frozenset({"kv_channels"}),
        translated=llama_settings.TRANSLATED,
        translate=_boosted,
    ),
    GGUF(
        llama_like.KEYS | llama_like.EXPERT_KEYS | {"sliding_window": "attention.sliding_window"},
        permuted=True,
        infer=infer_from_gguf,
    ),
    no_effect={"pretraining_tp": KERNEL, "is_llama_config": "the same as model_type"},
)
