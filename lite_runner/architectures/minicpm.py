"""MiniCPM 1 and 2: a Llama with multipliers of embeddings, residual connections and logits."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import llama_like
from lite_runner.architectures.architecture import Architecture
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.spec import Decoder


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields = fields.with_defaults(tie_word_embeddings=True)
    fields.neutral(num_experts=0)
    bias = fields.flag("attention_bias", False)
    sizes = llama_like.sizes(fields, positions=2048)
    base = fields.integer("dim_model_base", default=1)
    return llama_like.decoder(
        architecture="minicpm",
        qkv_bias=bias,
        out_bias=bias,
        embedding_scale=fields.number("scale_emb", 1.0),
        residual_scale=fields.number("scale_depth", 1.0) / sizes["num_layers"] ** 0.5,
        logits_scaling=sizes["hidden_size"] / base,
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    return llama_like.shared(model) | {
        "architectures": ["MiniCPMForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
        "dim_model_base": round(model.hidden_size / model.logits_scaling),
        "scale_depth": round(model.blocks[0].residual_scale * model.num_layers**0.5, 9),
        "scale_emb": model.embedding_scale,
    }


MINICPM = Architecture(
    "minicpm", read, llama_like.NAMES, write, no_effect={"pretraining_tp": KERNEL}
)
