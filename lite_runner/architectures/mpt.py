"""MPT: ALiBi, LayerNorm without biases, and no biases at all."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import GGUF, Architecture
from lite_runner.architectures.fields import KERNEL, MAX_LAYERS, NO_EFFECT, TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Attention, Block, Decoder, FeedForward, Norm

_OURS, _LAYER = "model.layers.{}", "transformer.blocks.{}"
NAMES: Names = {
    "embedding": Name("model.tok_embeddings.embedding_weight", "transformer.wte"),
    "query": Name(f"{_OURS}.attention.wq", f"{_LAYER}.attn.Wqkv", 0),
    "key": Name(f"{_OURS}.attention.wk", f"{_LAYER}.attn.Wqkv", 1),
    "value": Name(f"{_OURS}.attention.wv", f"{_LAYER}.attn.Wqkv", 2),
    "attention_out": Name(f"{_OURS}.attention.wo", f"{_LAYER}.attn.out_proj"),
    "up": Name(f"{_OURS}.feed_forward.w1", f"{_LAYER}.ffn.up_proj"),
    "down": Name(f"{_OURS}.feed_forward.w2", f"{_LAYER}.ffn.down_proj"),
    "attention_norm": Name(f"{_OURS}.attention_norm", f"{_LAYER}.norm_1"),
    "feed_forward_norm": Name(f"{_OURS}.ffn_norm", f"{_LAYER}.norm_2"),
    "norm": Name("model.norm_out", "transformer.norm_f"),
}


def read(fields: Fields) -> Decoder:
    hidden = fields.integer("d_model", "hidden_size")
    heads = fields.integer("n_heads", "num_attention_heads")
    # transformers does not read the ratio; the published code does.
    fields.neutral(no_bias=True, logit_scale=None, expansion_ratio=4)
    inner = fields.section("attn_config")
    inner.neutral(alibi=True, alibi_bias_max=8, attn_type="multihead_attention", qk_ln=False)
    inner.neutral(prefix_lm=False, attn_uses_sequence_id=False)
    if heads & (heads - 1):  # of other numbers its slopes are not BLOOM's
        raise fields.invalid("n_heads", heads, "a power of 2")
    norm = Norm("layer", fields.number("layer_norm_epsilon", 1e-5), bias=False)
    scale, clip = map(inner.optional_number, ("softmax_scale", "clip_qkv"))
    size = fields.head_dim(hidden, heads)
    attention = Attention(heads, heads, size, alibi=True, scale=scale, clip=clip)
    block = Block(norm, attention, FeedForward(4 * hidden, False, False, "gelu_exact"))
    vocab_size = fields.integer("vocab_size")
    return Decoder(
        "mpt",
        vocab_size,
        hidden,
        fields.integer("max_seq_len", default=2048),
        (block,) * fields.integer("n_layers", "num_hidden_layers", most=MAX_LAYERS),
        norm,
        fields.flag("tie_word_embeddings", True),
        **fields.tokens(vocab_size),
    )


def write(model: Decoder) -> dict[str, Any]:
    return {
        "architectures": ["MptForCausalLM"],
        "d_model": model.hidden_size,
        "n_heads": model.num_heads,
        "n_layers": model.num_layers,
        "max_seq_len": model.seq_length,
        "layer_norm_epsilon": model.norm_eps,
        "attn_config": {"softmax_scale": model.attention.scale, "clip_qkv": model.attention.clip},
    }


MPT = Architecture(
    "mpt",
    read,
    NAMES,
    write,
    gguf=GGUF(
        {
            "max_seq_len": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
            "clip": "attention.clamp_kqv",
        },
        infer=lambda tensors, given: {"attn_config": {"clip_qkv": given["clip"]}},
        written=False,
    ),
    no_effect={
        # transformers 5 writes all that a config of its own has.
        **{f"attn_config.{name}": reason for name, reason in NO_EFFECT.items()},
        **dict.fromkeys(("attn_config.is_encoder_decoder", "attn_config.model_type"), KERNEL),
        "attn_config.attn_impl": KERNEL,
        **dict.fromkeys(("attn_config.attn_pdrop", "embedding_fraction", "emb_pdrop"), TRAINING),
        **dict.fromkeys(("resid_pdrop", "init_config", "verbose"), TRAINING),
        "init_device": KERNEL,
        "learned_pos_emb": "with ALiBi there is no table of positions",
        "norm_type": "the precision of LayerNorm in training",
    },
)
