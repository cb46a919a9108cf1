"""MiniCPM 1 and 2: a Llama with multipliers of embeddings, residual connections and logits."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import GGUF, Architecture, llama_like
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.spec import Decoder


def read(fields: Fields) -> Decoder:
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
    return llama_like.shared(model) | {
        "architectures": ["MiniCPMForCausalLM"],
        "attention_bias": model.attention.qkv_bias,
        "dim_model_base": round(model.hidden_size / model.logits_scaling),
        "scale_depth": round(model.blocks[0].residual_scale * model.num_layers**0.5, 9),
        "scale_emb": model.embedding_scale,
    }


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The multipliers as config.json has them; older files leave out those of MiniCPM-2B."""
    residual, logits = given["residual"], given["logits"]
    return {
        "scale_emb": given["scale_emb"] or 12.0,
        "scale_depth": residual * given["num_hidden_layers"] ** 0.5 if residual else 1.4,
        "dim_model_base": round(given["hidden_size"] / logits) if logits else 256,
    }


MINICPM = Architecture(
    "minicpm",
    read,
    llama_like.NAMES,
    write,
    gguf=GGUF(
        llama_like.KEYS
        | {
            "hidden_size": "embedding_length",
            "scale_emb": "embedding_scale",
            "residual": "residual_scale",
            "logits": "logit_scale",
        },
        permuted=True,
        flags=llama_like.BIAS_FLAG,
        infer=infer_from_gguf,
    ),
    no_effect={"pretraining_tp": KERNEL},
)
