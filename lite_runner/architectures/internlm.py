"""InternLM: a Llama with biases of attention; InternLM2: a Llama whose q, k and v are fused."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, llama_like, llama_settings, row_order
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.settings import PREFIX, Translation
from lite_runner.architectures.spec import Decoder
from lite_runner.records import dataclass

_OURS = "model.layers.{}"
_FUSED = f"{_OURS}.attention.wqkv"
NAMES: Names = {
    "embedding": Name("model.tok_embeddings.embedding_weight", "model.tok_embeddings"),
    "query": Name(f"{_OURS}.attention.wq", _FUSED, 0, gguf="blk.{}.attn_q"),
    "key": Name(f"{_OURS}.attention.wk", _FUSED, 1, gguf="blk.{}.attn_k"),
    "value": Name(f"{_OURS}.attention.wv", _FUSED, 2, gguf="blk.{}.attn_v"),
    "attention_out": Name(f"{_OURS}.attention.wo", f"{_OURS}.attention.wo"),
    "gate": Name(f"{_OURS}.feed_forward.w1", f"{_OURS}.feed_forward.w1"),
    "down": Name(f"{_OURS}.feed_forward.w2", f"{_OURS}.feed_forward.w2"),
    "up": Name(f"{_OURS}.feed_forward.w3", f"{_OURS}.feed_forward.w3"),
    "attention_norm": Name(f"{_OURS}.attention_norm", f"{_OURS}.attention_norm"),
    "feed_forward_norm": Name(f"{_OURS}.ffn_norm", f"{_OURS}.ffn_norm"),
    "norm": Name("model.norm_out", "model.norm"),
    "head": Name("lm_head", "output"),
}


def read(fields: Fields, architecture: str) -> Decoder:
    """From config.json."""
    if architecture == "internlm":
        # Its "dynamic" rotation differs from the usual one behind max_position_embeddings only.
        rotary = fields.section("rotary")
        rotary.choice("type", ("origin", "dynamic"))
        fields = fields.with_defaults(rope_theta=rotary.number("base", 10000.0))
    bias = fields.flag("bias", True)
    return llama_like.decoder(
        architecture=architecture,
        qkv_bias=bias,
        out_bias=bias,
        **llama_like.sizes(fields, positions=2048),
    )


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    found = llama_like.shared(model) | {"bias": model.attention.out_bias}
    if model.architecture == "internlm":
        theta = found.pop("rope_theta")
        return found | {
            "architectures": ["InternLMForCausalLM"],
            "rotary": {"base": theta, "type": "origin"},
        }
    return found | {"architectures": ["InternLM2ForCausalLM"]}


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Biases by those of queries; q, k and v are apart."""
    return {"bias": "blk.0.attn_q.bias" in tensors}


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """has_bias is of all four matrices of attention."""
    llama_settings.translate(raw, defaults, result)
    if (bias := raw["model"]["model_config"].get("has_bias")) is not None:
        result.assignments |= {f"{PREFIX}{name}_has_bias": bias for name in ("qkv", "attn_proj")}


@dataclass(frozen=True, kw_only=True)
class InternLMSettings(llama_settings.LlamaLikeSettings):
    """Settings of InternLM."""

    type: Literal["InternLMConfig"] = "InternLMConfig"


@dataclass(frozen=True, kw_only=True)
class InternLM2Settings(llama_settings.LlamaLikeSettings):
    """Settings of InternLM2."""

    type: Literal["InternLM2Config"] = "InternLM2Config"


INTERNLM = Architecture(
    "internlm",
    lambda fields: read(fields, "internlm"),
    llama_like.NAMES,
    write,
    llama_settings.mindformers(
        InternLMSettings,
        "InternLMForCausalLM",
        "internlm_7b",
        partial(llama_like.decoder, architecture="internlm"),
        translated=llama_settings.TRANSLATED | {"has_bias"},
        translate=translate,
    ),
)
INTERNLM2 = Architecture(
    "internlm2",
    lambda fields: read(fields, "internlm2"),
    NAMES,
    write,
    llama_settings.mindformers(
        InternLM2Settings,
        "InternLM2ForCausalLM",
        "internlm2_7b",
        partial(llama_like.decoder, architecture="internlm2"),
        translated=llama_settings.TRANSLATED,
        translate=llama_settings.translate,
    ),
    GGUF(llama_like.KEYS, permuted=True, infer=infer_from_gguf),
    no_effect={"pretraining_tp": KERNEL},
    stored_rows=row_order.by_head,
)
