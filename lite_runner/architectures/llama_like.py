"""What is built like a Llama: its blocks, the names of its tensors, and config.json of all such."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lite_runner.architectures.fields import MAX_LAYERS, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.rope_fields import rope_from_hf, rope_scaling_to_hf
from lite_runner.architectures.spec import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Norm,
    Rotary,
)

SILU = ("silu", "swish")

NAMES: Names = {
    "embedding": Name("model.tok_embeddings.embedding_weight", "model.embed_tokens"),
    "query": Name("model.layers.{}.attention.wq", "model.layers.{}.self_attn.q_proj"),
    "key": Name("model.layers.{}.attention.wk", "model.layers.{}.self_attn.k_proj"),
    "value": Name("model.layers.{}.attention.wv", "model.layers.{}.self_attn.v_proj"),
    "attention_out": Name("model.layers.{}.attention.wo", "model.layers.{}.self_attn.o_proj"),
    "gate": Name("model.layers.{}.feed_forward.w1", "model.layers.{}.mlp.gate_proj"),
    "down": Name("model.layers.{}.feed_forward.w2", "model.layers.{}.mlp.down_proj"),
    "up": Name("model.layers.{}.feed_forward.w3", "model.layers.{}.mlp.up_proj"),
    "attention_norm": Name("model.layers.{}.attention_norm", "model.layers.{}.input_layernorm"),
    "feed_forward_norm": Name(
        "model.layers.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"
    ),
    "norm": Name("model.norm_out", "model.norm"),
}
KEYS = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def decoder(
    *,
    architecture: str = "",
    num_layers: int,
    num_heads: int,
    n_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    norm_eps: float,
    rotary: Rotary,
    seq_length: int,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: Sequence[int | None] = (),
    **rest: Any,
) -> Decoder:
    """A decoder whose layers are those of a Llama; `rest` are fields of Decoder.

    `windows` are those of the layers, none if it is empty; one of at least seq_length hides
    nothing, so it is none, too. Without an `architecture` it is a Llama, or with biases on q, k and
    v alone a Qwen2, or else with windows a Mistral: MindFormers does not tell them apart.
    """
    if not architecture:
        alike = "mistral" if any(windows) else "llama"
        architecture = "qwen2" if qkv_bias and not out_bias else alike
    norm = Norm("rms", norm_eps)
    attention = Attention(
        num_heads,
        n_kv_heads,
        head_dim,
        rotary,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=norm if qk_norm else None,
    )
    feed_forward = FeedForward(intermediate_size, gated=True, bias=mlp_bias)

    def block(window: int | None) -> Block:
        hides = window is not None and window < seq_length
        return Block(
            norm, dataclasses.replace(attention, window=window if hides else None), feed_forward
        )

    blocks = tuple(map(block, windows or (None,) * num_layers))
    return Decoder(architecture, seq_length=seq_length, blocks=blocks, norm=norm, **rest)


def sizes(fields: Fields, *, positions: int) -> dict[str, Any]:
    """What config.json says of every Llama-like model, as `decoder` takes it; without
    max_position_embeddings there are `positions`."""
    fields.choice("hidden_act", SILU)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.fault("num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
    if fields.raw.get("head_dim") is None:
        head_dim = fields.head_dim(hidden, heads)
    else:
        head_dim = fields.integer("head_dim")
    if head_dim % 2:
        raise fields.fault("head_dim", head_dim, "an even number, for the rotary embedding")
    positions = fields.integer("max_position_embeddings", default=positions)
    theta, scaling = rope_from_hf(fields, positions)
    # Dynamic scaling starts where the trained positions end, so there the context goes on.
    if scaling is not None and scaling.type == "dynamic":
        positions = int(positions * scaling.factor)
    vocab_size = fields.integer("vocab_size")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers", most=MAX_LAYERS),
        "num_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size"),
        "seq_length": positions,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "rotary": Rotary(theta, scaling),
        **fields.tokens(vocab_size),
    }


def shared(model: Decoder) -> dict[str, Any]:
    """What config.json says of every Llama-like model, in words that transformers 4 and 5 both
    read."""
    rotary = model.rotary or Rotary()
    scaling = rotary.scaling
    dynamic = scaling is not None and scaling.type == "dynamic"
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": scaling.original_seq_length
        if scaling is not None and dynamic
        else model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rotary.theta,
        "rope_scaling": None if scaling is None else rope_scaling_to_hf(scaling),
    }
