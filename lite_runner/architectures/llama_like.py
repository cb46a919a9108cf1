"""Llama-like models: blocks, tensor names, and the shared part of config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Literal

from lite_runner.architectures.fields import MAX_LAYERS, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.rope_fields import (
    rope_from_hf,
    rope_scaling_to_hf,
    rotary_dims,
)
from lite_runner.architectures.spec import (
    Activation,
    Attention,
    Block,
    Decoder,
    Experts,
    FeedForward,
    Norm,
    Rotary,
)
from lite_runner.records import dataclass

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


@dataclass(frozen=True)
class Mixture:
    """The experts of a model whose layers have some, but for the dense ones."""

    experts: Experts
    width: int  # of each expert
    dense_layers: Collection[int] = ()


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
    qk_norm_by_head: bool = True,
    norms: Literal["before", "after", "both"] = "before",
    softcap: float | None = None,
    activation: Activation | None = None,
    local_rotary: Rotary | None = None,
    scale: float | None = None,
    residual_scale: float = 1.0,
    rotary_layers: Sequence[bool] = (),
    windows: Sequence[int | None] = (),
    mixture: Mixture | None = None,
    **rest: Any,
) -> Decoder:
    """A decoder with Llama blocks; `rest` are fields of Decoder.

    `windows` are the sliding windows per layer (empty: none); a window of at least seq_length masks
    nothing and counts as none. `rotary_layers`: which layers have positions (empty: all).
    `norms`: whether these are before attention and feed-forward, or behind them. `local_rotary`: of
    the layers with windows, which then keep any window (None: as of the others).
    `intermediate_size` is of dense layers.

    Without `architecture` it is qwen2 if only q, k and v have biases,
    else mistral if there are windows, else llama: MindFormers has one config class for all three.
    """
    if not architecture:
        plain = "mistral" if any(windows) else "llama"
        architecture = "qwen2" if qkv_bias and not out_bias else plain
    norm = Norm("rms", norm_eps)
    attention = Attention(
        num_heads,
        n_kv_heads,
        head_dim,
        rotary,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=norm if qk_norm else None,
        qk_norm_by_head=qk_norm_by_head,
        scale=scale,
        softcap=softcap,
    )
    feed_forward = FeedForward(intermediate_size, True, mlp_bias, activation)
    before = None if norms == "after" else norm
    after = None if norms == "before" else norm

    sparse = feed_forward
    if mixture is not None:
        sparse = dataclasses.replace(feed_forward, width=mixture.width, experts=mixture.experts)
    dense_layers = range(num_layers) if mixture is None else mixture.dense_layers

    def block(layer: int, window: int | None, rotates: bool) -> Block:
        # A window of the whole context still tells which layers have the local positions.
        masks = window is not None and (local_rotary is not None or window < seq_length)
        positions = rotary if window is None else local_rotary or rotary
        own = dataclasses.replace(
            attention,
            window=window if masks else None,
            rotary=positions if rotates else None,
        )
        wide = feed_forward if layer in dense_layers else sparse
        return Block(before, own, wide, after, residual_scale)

    none, every = (None,) * num_layers, (True,) * num_layers
    blocks = tuple(map(block, range(num_layers), windows or none, rotary_layers or every))
    return Decoder(architecture, seq_length=seq_length, blocks=blocks, norm=norm, **rest)


def sizes(
    fields: Fields, *, positions: int, partial: float | None = None, rope: Fields | None = None
) -> dict[str, Any]:
    """The shared fields of config.json, as `decoder` takes them; `positions` is the default of
    max_position_embeddings, `partial` that of partial_rotary_factor (None: it must be 1); `rope`:
    see rope_from_hf."""
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
    dims = None if partial is None else rotary_dims(fields, head_dim, partial)
    theta, scaling = rope_from_hf(
        fields, positions, dims or head_dim, rope, partial=partial is not None
    )
    # Dynamic scaling extends the context beyond the trained positions.
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
        "rotary": Rotary(theta, scaling, dims),
        **fields.tokens(vocab_size),
    }


def shared(model: Decoder) -> dict[str, Any]:
    """The shared fields of config.json, with keys that both transformers 4 and 5 read."""
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
