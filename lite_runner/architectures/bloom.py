"""BLOOM: ALiBi instead of position embeddings, and a LayerNorm after the embedding."""

from __future__ import annotations

from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, MindFormers, gpt2, row_order
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder, Norm
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass

_FUSED = "transformer.h.{}.self_attention.query_key_value"

NAMES: Names = {
    "embedding": Name("embedding.word_embedding.embedding_table", "transformer.word_embeddings"),
    "embedding_norm": Name("embedding.norm", "transformer.word_embeddings_layernorm"),
    "attention_norm": Name("blocks.{}.layernorm1", "transformer.h.{}.input_layernorm"),
    "query": Name("blocks.{}.attention.dense1", _FUSED, 0),
    "key": Name("blocks.{}.attention.dense2", _FUSED, 1),
    "value": Name("blocks.{}.attention.dense3", _FUSED, 2),
    "attention_out": Name(
        "blocks.{}.attention.projection", "transformer.h.{}.self_attention.dense", transposed=True
    ),
    "up": Name("blocks.{}.output.mapping", "transformer.h.{}.mlp.dense_h_to_4h", transposed=True),
    "down": Name(
        "blocks.{}.output.projection", "transformer.h.{}.mlp.dense_4h_to_h", transposed=True
    ),
    "feed_forward_norm": Name("blocks.{}.layernorm2", "transformer.h.{}.post_attention_layernorm"),
    "norm": Name("ln_f", "transformer.ln_f"),
}


def decoder(*, norm_eps: float, **rest: Any) -> Decoder:
    """`rest`: see gpt2.decoder."""
    return gpt2.decoder(
        architecture="bloom",
        norm_eps=norm_eps,
        alibi=True,
        embedding_norm=Norm("layer", norm_eps),
        **rest,
    )


def read(fields: Fields) -> Decoder:
    slices = fields.integer("pretraining_tp", default=1)
    if fields.flag("slow_but_exact", False) and slices > 1:
        raise ArtifactError(
            f"{fields.where}: slow_but_exact=true is not supported with pretraining_tp={slices}: "
            "it drops the biases of two projections"
        )
    hidden = fields.integer("n_embed", "hidden_size")
    wide = fields.integer("n_inner", default=4 * hidden)
    if wide != 4 * hidden:
        raise fields.invalid("n_inner", wide, f"4 * hidden_size = {4 * hidden}")
    fields.choice("hidden_act", ("gelu", gpt2.QUICK_GELU))
    normed = fields.flag("apply_residual_connection_post_layernorm", False)
    return decoder(
        **gpt2.sizes(fields, hidden),
        normed_residual=1.0 if normed else None,
        intermediate_size=wide,
        activation=gpt2.QUICK_GELU if fields.raw.get("hidden_act") == gpt2.QUICK_GELU else None,
        seq_length=fields.integer("seq_length", default=2048),
    )


def write(model: Decoder) -> dict[str, Any]:
    """config.json, with keys that both transformers 4 and 5 read."""
    return {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "layer_norm_epsilon": model.norm_eps,
        "seq_length": model.seq_length,
        **({"hidden_act": gpt2.QUICK_GELU} if gpt2.quick(model) else {}),
        "apply_residual_connection_post_layernorm": model.blocks[0].normed_residual is not None,
    }


@dataclass(frozen=True, kw_only=True)
class BloomSettings(gpt2.LayerNormSettings):
    """Settings of BLOOM."""

    type: Literal["BloomConfig"] = "BloomConfig"


BLOOM = Architecture(
    "bloom",
    read,
    NAMES,
    write,
    MindFormers(
        BloomSettings,
        "BloomLMHeadModel",
        "common",
        gpt2.settings,
        lambda given: decoder(**gpt2.sizes_of_settings(given)),
        sizes={"expand_ratio": "expand_ratio"},
        model="bloom_560m",
    ),
    GGUF(gpt2.KEYS),
    no_effect=dict.fromkeys(
        (
            *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
            *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv"),
        ),
        KERNEL,
    ),
    stored_rows=row_order.by_head,
    always_tied=True,
    not_theirs=lambda model: "hidden_act=fast_gelu" if gpt2.quick(model) else None,
)
