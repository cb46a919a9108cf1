"""InternLM: a Llama with biases of attention; InternLM2: a Llama whose q, k and v are fused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lite_runner.architectures import GGUF, Architecture, llama, llama_like, row_order
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.settings import PREFIX, Translation
from lite_runner.architectures.spec import Decoder

_FUSED = "model.layers.{}.attention.wqkv"
NAMES: Names = {
    **{role: Name(one.mindformers, one.mindformers) for role, one in llama_like.NAMES.items()},
    "embedding": Name("model.tok_embeddings.embedding_weight", "model.tok_embeddings"),
    "query": Name("model.layers.{}.attention.wq", _FUSED, 0, gguf="blk.{}.attn_q"),
    "key": Name("model.layers.{}.attention.wk", _FUSED, 1, gguf="blk.{}.attn_k"),
    "value": Name("model.layers.{}.attention.wv", _FUSED, 2, gguf="blk.{}.attn_v"),
    "norm": llama_like.NAMES["norm"],
    "head": Name("lm_head", "output"),
}


def read(fields: Fields, architecture: str) -> Decoder:
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
    found = llama_like.shared(model) | {"bias": model.attention.out_bias}
    if model.architecture == "internlm":
        theta = found.pop("rope_theta")
        return found | {
            "architectures": ["InternLMForCausalLM"],
            "rotary": {"base": theta, "type": "origin"},
        }
    return found | {"architectures": ["InternLM2ForCausalLM"]}


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """has_bias is of all four matrices of attention."""
    llama.translate(raw, defaults, result)
    if (bias := raw["model"]["model_config"].get("has_bias")) is not None:
        result.assignments |= {f"{PREFIX}{name}_has_bias": bias for name in ("qkv", "attn_proj")}


INTERNLM = Architecture(
    "internlm",
    lambda fields: read(fields, "internlm"),
    llama_like.NAMES,
    write,
    llama.mindformers(
        "InternLMConfig",
        "InternLMForCausalLM",
        "internlm_7b",
        partial(llama_like.decoder, architecture="internlm"),
        translated=llama.TRANSLATED | {"has_bias"},
        translate=translate,
    ),
)
INTERNLM2 = Architecture(
    "internlm2",
    lambda fields: read(fields, "internlm2"),
    NAMES,
    write,
    llama.mindformers(
        "InternLM2Config",
        "InternLM2ForCausalLM",
        "internlm2_7b",
        partial(llama_like.decoder, architecture="internlm2"),
        translated=llama.TRANSLATED,
        translate=llama.translate,
    ),
    GGUF(llama_like.KEYS, permuted=True, flags={"bias": "blk.0.attn_q.bias"}),
    no_effect={"pretraining_tp": KERNEL},
    stored_rows=row_order.by_head,
)
