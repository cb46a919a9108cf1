"""GPT-NeoX and Pythia: rotary positions on a part of each head, q, k and v fused by head, and
attention and feed-forward that take the same input."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, MindFormers, apart, row_order, starcoder2
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder, Rotary
from lite_runner.records import dataclass

_OURS, _LAYER = "model.layers.{}", "gpt_neox.layers.{}"
_FUSED = f"{_LAYER}.attention.query_key_value"
NAMES: Names = {
    "embedding": Name("model.tok_embeddings.embedding_weight", "gpt_neox.embed_in"),
    "query": Name(f"{_OURS}.attention.wq", _FUSED, 0),
    "key": Name(f"{_OURS}.attention.wk", _FUSED, 1),
    "value": Name(f"{_OURS}.attention.wv", _FUSED, 2),
    "attention_out": Name(f"{_OURS}.attention.wo", f"{_LAYER}.attention.dense"),
    "up": Name(f"{_OURS}.feed_forward.w1", f"{_LAYER}.mlp.dense_h_to_4h"),
    "down": Name(f"{_OURS}.feed_forward.w2", f"{_LAYER}.mlp.dense_4h_to_h"),
    "attention_norm": Name(f"{_OURS}.attention_norm", f"{_LAYER}.input_layernorm"),
    "feed_forward_norm": Name(f"{_OURS}.ffn_norm", f"{_LAYER}.post_attention_layernorm"),
    "norm": Name("model.norm_out", "gpt_neox.final_layer_norm"),
    "head": Name("lm_head", "embed_out"),
}


def decoder(**sizes: Any) -> Decoder:
    return starcoder2.decoder(architecture="gpt_neox", **sizes)


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        vocab_size=50432,
        hidden_size=6144,
        num_hidden_layers=44,
        num_attention_heads=64,
        intermediate_size=24576,
        hidden_act=starcoder2.EXACT_GELU,
    )
    # Before transformers 5 these had names of their own.
    theta, factor = fields.number("rotary_emb_base", 10000.0), fields.number("rotary_pct", 0.25)
    same = fields.with_defaults(rope_theta=theta).with_values(num_key_value_heads=None)
    found = starcoder2.sizes(
        same, "attention_bias", "layer_norm_eps", positions=2048, partial=factor
    )
    attention = found["attention"]
    rotary = attention.rotary
    if rotary.dims == attention.head_dim:
        whole = dataclasses.replace(rotary, dims=None)
        found["attention"] = dataclasses.replace(attention, rotary=whole)
    # Its feed-forward network always has biases.
    found["feed_forward"] = dataclasses.replace(found["feed_forward"], bias=True)
    return decoder(parallel=fields.flag("use_parallel_residual", True), **found)


def write(model: Decoder) -> dict[str, Any]:
    """config.json, with keys that both transformers 4 and 5 read."""
    rotary = model.rotary or Rotary()
    found = starcoder2.shared(model)
    for key in ("num_key_value_heads", "head_dim", "rope_theta"):
        del found[key]
    return found | {
        "architectures": ["GPTNeoXForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
        "layer_norm_eps": model.norm_eps,
        "rotary_emb_base": rotary.theta,
        "rotary_pct": (rotary.dims or model.head_dim) / model.head_dim,
        "use_parallel_residual": model.blocks[0].parallel,
    }


def from_settings(given: Mapping[str, Any]) -> Decoder:
    """The inverse of starcoder2.settings."""
    return decoder(**starcoder2.sizes_of_settings(given))


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The rotated part of a head as a fraction; biases by their tensors."""
    head_dim = given["hidden_size"] // given["num_attention_heads"]
    dims = given.get("rotary_dims")
    return {
        "attention_bias": "blk.0.attn_qkv.bias" in tensors,
        "rotary_pct": None if dims is None else dims / head_dim,
    }


@dataclass(frozen=True, kw_only=True)
class GPTNeoXSettings(starcoder2.RotaryLayerNormSettings):
    """Settings of GPT-NeoX."""

    type: Literal["GPTNeoXConfig"] = "GPTNeoXConfig"


GPT_NEOX = Architecture(
    "gpt_neox",
    read,
    NAMES,
    write,
    MindFormers(
        GPTNeoXSettings,
        "GPTNeoXForCausalLM",
        "llama",
        starcoder2.settings,
        from_settings,
        model="pythia_160m",
    ),
    GGUF(
        {
            "hidden_size": "embedding_length",
            "num_attention_heads": "attention.head_count",
            "layer_norm_eps": "attention.layer_norm_epsilon",
            "rotary_dims": "rope.dimension_count",
            "use_parallel_residual": "use_parallel_residual",
        },
        infer=infer_from_gguf,
        name="gptneox",
        rows=row_order.rotated_first(apart),
    ),
    stored_rows=row_order.rotated_first(row_order.by_head),
)
