"""Falcon: LayerNorm, attention beside the feed-forward network, few key heads, and rotary positions
or ALiBi, whose slopes are scaled as the scores are."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import GGUF, Architecture, gpt2, llama_like, row_order, starcoder2
from lite_runner.architectures.fields import MAX_LAYERS, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Attention, Decoder, FeedForward, Rotary

_OURS, _LAYER = "model.layers.{}", "transformer.h.{}"
_FUSED = f"{_LAYER}.self_attention.query_key_value"
NAMES: Names = {
    "embedding": Name("model.tok_embeddings.embedding_weight", "transformer.word_embeddings"),
    "query": Name(f"{_OURS}.attention.wq", _FUSED, 0),
    "key": Name(f"{_OURS}.attention.wk", _FUSED, 1),
    "value": Name(f"{_OURS}.attention.wv", _FUSED, 2),
    "attention_out": Name(f"{_OURS}.attention.wo", f"{_LAYER}.self_attention.dense"),
    "up": Name(f"{_OURS}.feed_forward.w1", f"{_LAYER}.mlp.dense_h_to_4h"),
    "down": Name(f"{_OURS}.feed_forward.w2", f"{_LAYER}.mlp.dense_4h_to_h"),
    "attention_norm": Name(f"{_OURS}.attention_norm", f"{_LAYER}.input_layernorm"),
    "feed_forward_norm": Name(f"{_OURS}.ffn_norm", f"{_LAYER}.post_attention_layernorm"),
    "norm": Name("model.norm_out", "transformer.ln_f"),
}
_TWO_NORMS: Names = {
    "attention_norm": Name(
        f"{_OURS}.attention_norm", f"{_LAYER}.ln_attn", gguf="blk.{}.attn_norm_2"
    ),
    "feed_forward_norm": Name(f"{_OURS}.ffn_norm", f"{_LAYER}.ln_mlp", gguf="blk.{}.attn_norm"),
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(activation="gelu")
    hidden, heads = fields.integer("n_embed", "hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.head_dim(hidden, heads)
    positions = fields.integer("max_position_embeddings", default=2048)
    newer = fields.flag("new_decoder_architecture", False)
    kv_heads = fields.integer("num_kv_heads", default=heads)
    if heads % kv_heads:
        raise fields.invalid("num_kv_heads", kv_heads, f"a divisor of the {heads} heads")
    multi_query = fields.flag("multi_query", True)
    if not newer:
        kv_heads = 1 if multi_query else heads
    parallel = fields.flag("parallel_attn", True)
    if newer and not parallel:
        raise fields.invalid("parallel_attn", False, "true with new_decoder_architecture=true")
    norms = fields.integer("num_ln_in_parallel_attn", default=2 if newer else 1, most=2)
    bias, alibi = fields.flag("bias", False), fields.flag("alibi", False)
    rotary = Rotary(*llama_like.rope_from_hf(fields, positions, head_dim))
    attention = Attention(
        heads,
        kv_heads,
        head_dim,
        None if alibi else rotary,
        alibi=alibi,
        alibi_scale=head_dim**-0.5 if alibi else 1.0,
        qkv_bias=bias,
        out_bias=bias,
    )
    width = fields.integer("ffn_hidden_size", default=4 * hidden)
    vocab_size = fields.integer("vocab_size")
    model = starcoder2.decoder(
        attention,
        FeedForward(width, False, bias, gpt2.read_activation(fields, "activation")),
        architecture="falcon",
        num_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        vocab_size=vocab_size,
        seq_length=positions,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        parallel=parallel,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        **fields.tokens(vocab_size),
    )
    return llama_like.changed(model, shared_norm=parallel and norms == 1)


def write(model: Decoder) -> dict[str, Any]:
    attention, first = model.attention, model.blocks[0]
    found = llama_like.shared(model)
    for key in (
        *("rms_norm_eps", "num_key_value_heads", "intermediate_size", "head_dim", "hidden_act"),
        *(("rope_theta", "rope_scaling") if attention.alibi else ()),
    ):
        del found[key]
    newer = first.parallel and (attention.kv_heads > 1 or not first.shared_norm)
    return found | {
        "architectures": ["FalconForCausalLM"],
        "activation": gpt2.ACTIVATIONS[model.feed_forward.function],
        "alibi": attention.alibi,
        "bias": attention.qkv_bias,
        "ffn_hidden_size": model.intermediate_size,
        "layer_norm_epsilon": model.norm_eps,
        "multi_query": attention.kv_heads == 1,
        "new_decoder_architecture": newer,
        "num_kv_heads": attention.kv_heads,
        "num_ln_in_parallel_attn": 1 if first.shared_norm else 2,
        "parallel_attn": first.parallel,
    }


def renamed(model: Decoder) -> Names:
    """With two norms before attention and feed-forward of the same input."""
    first = model.blocks[0]
    return _TWO_NORMS if first.parallel and not first.shared_norm else {}


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp has the models alone whose attention is beside the feed-forward network."""
    two = "blk.0.attn_norm_2.weight" in tensors
    return {
        "bias": "blk.0.attn_qkv.bias" in tensors,
        "new_decoder_architecture": two or given["num_kv_heads"] != 1,
        "num_ln_in_parallel_attn": 2 if two else 1,
    }


FALCON = Architecture(
    "falcon",
    read,
    NAMES,
    write,
    gguf=GGUF(
        {
            "num_kv_heads": "attention.head_count_kv",
            "ffn_hidden_size": "feed_forward_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        infer=infer_from_gguf,
    ),
    renamed=renamed,
    stored_rows=row_order.by_head,
)
