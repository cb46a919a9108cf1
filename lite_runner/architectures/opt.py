"""OPT: a GPT-2 with ReLU, and learned positions from the third row of their table on. The one of
350 million parameters is post-norm, with a narrower embedding, into which its projections are
multiplied."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import Architecture, llama_like
from lite_runner.architectures.fields import MAX_LAYERS, TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Attention, Block, Decoder, FeedForward, Norm

_OURS, _LAYER = "model.layers.{}", "model.decoder.layers.{}"
NAMES: Names = {
    "embedding": Name("model.tok_embeddings.embedding_weight", "model.decoder.embed_tokens"),
    "positions": Name("model.position_embeddings.weight", "model.decoder.embed_positions"),
    "query": Name(f"{_OURS}.attention.wq", f"{_LAYER}.self_attn.q_proj"),
    "key": Name(f"{_OURS}.attention.wk", f"{_LAYER}.self_attn.k_proj"),
    "value": Name(f"{_OURS}.attention.wv", f"{_LAYER}.self_attn.v_proj"),
    "attention_out": Name(f"{_OURS}.attention.wo", f"{_LAYER}.self_attn.out_proj"),
    "up": Name(f"{_OURS}.feed_forward.w1", f"{_LAYER}.fc1"),
    "down": Name(f"{_OURS}.feed_forward.w2", f"{_LAYER}.fc2"),
    "attention_norm": Name(f"{_OURS}.attention_norm", f"{_LAYER}.self_attn_layer_norm"),
    "feed_forward_norm": Name(f"{_OURS}.ffn_norm", f"{_LAYER}.final_layer_norm"),
    "sum_norm": Name(f"{_OURS}.attention_norm", f"{_LAYER}.self_attn_layer_norm"),
    "out_norm": Name(f"{_OURS}.ffn_norm", f"{_LAYER}.final_layer_norm"),
    "norm": Name("model.norm_out", "model.decoder.final_layer_norm"),
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(tie_word_embeddings=True, activation_function="relu")
    fields.neutral(layer_norm_elementwise_affine=True)
    hidden = fields.integer("hidden_size")
    narrow = fields.integer("word_embed_proj_dim", default=hidden) != hidden
    first = fields.flag("do_layer_norm_before", True)
    bare = fields.flag("_remove_final_layer_norm", False) or not first
    heads = fields.integer("num_attention_heads")
    vocab_size, norm = fields.integer("vocab_size"), Norm("layer", 1e-5)
    bias = fields.flag("enable_bias", True)
    activation = llama_like.read_activation(fields, "activation_function")
    block = Block(
        norm if first else None,
        Attention(heads, heads, fields.head_dim(hidden, heads), qkv_bias=bias, out_bias=bias),
        FeedForward(fields.integer("ffn_dim"), False, bias, activation),
        sum_norm=None if first else norm,
        out_norm=None if first else norm,
    )
    return Decoder(
        "opt",
        vocab_size,
        hidden,
        fields.integer("max_position_embeddings", default=2048),
        (block,) * fields.integer("num_hidden_layers", most=MAX_LAYERS),
        None if bare else norm,
        fields.flag("tie_word_embeddings", True) and not narrow,
        learned_positions=True,
        position_offset=2,
        **fields.tokens(vocab_size),
    )


def write(model: Decoder) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": model.hidden_size,
        "word_embed_proj_dim": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "ffn_dim": model.intermediate_size,
        "max_position_embeddings": model.seq_length,
        "activation_function": llama_like.activation_name(model.feed_forward.function),
        "enable_bias": model.feed_forward.bias,
        "do_layer_norm_before": model.blocks[0].norm is not None,
        "_remove_final_layer_norm": model.norm is None,
    }


OPT = Architecture(
    "opt",
    read,
    NAMES,
    write,
    projections=("model.decoder.project_in.weight", "model.decoder.project_out.weight"),
    no_effect=dict.fromkeys(("dropout", "layerdrop", "init_std"), TRAINING),
)
