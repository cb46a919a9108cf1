"""Qwen, the first one: a Llama with biases of q, k and v, in names of its own."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import llama_like
from lite_runner.architectures.architecture import Architecture
from lite_runner.architectures.fields import KERNEL, TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder

_OURS, _LAYER = "model.layers.{}", "transformer.h.{}"
NAMES: Names = {
    "embedding": Name("model.tok_embeddings.embedding_weight", "transformer.wte"),
    "query": Name(f"{_OURS}.attention.wq", f"{_LAYER}.attn.c_attn", 0),
    "key": Name(f"{_OURS}.attention.wk", f"{_LAYER}.attn.c_attn", 1),
    "value": Name(f"{_OURS}.attention.wv", f"{_LAYER}.attn.c_attn", 2),
    "attention_out": Name(f"{_OURS}.attention.wo", f"{_LAYER}.attn.c_proj"),
    "gate": Name(f"{_OURS}.feed_forward.w1", f"{_LAYER}.mlp.w2"),
    "down": Name(f"{_OURS}.feed_forward.w2", f"{_LAYER}.mlp.c_proj"),
    "up": Name(f"{_OURS}.feed_forward.w3", f"{_LAYER}.mlp.w1"),
    "attention_norm": Name(f"{_OURS}.attention_norm", f"{_LAYER}.ln_1"),
    "feed_forward_norm": Name(f"{_OURS}.ffn_norm", f"{_LAYER}.ln_2"),
    "norm": Name("model.norm_out", "transformer.ln_f"),
}


def read(fields: Fields) -> Decoder:
    """From config.json. Its context is seq_length: behind that the published code scales rotations
    and queries by the length."""
    fields.neutral(no_bias=True, rotary_pct=1.0, scale_attn_weights=True)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    width = fields.integer("intermediate_size")
    if width % 2:
        raise fields.invalid("intermediate_size", width, "an even number: of gate and up together")
    same = fields.with_values(
        intermediate_size=width // 2,
        max_position_embeddings=fields.integer("seq_length", default=2048),
        rms_norm_eps=fields.number("layer_norm_epsilon", 1e-6),
        rope_theta=fields.number("rotary_emb_base", 10000.0),
        head_dim=fields.integer("kv_channels", default=fields.head_dim(hidden, heads)),
    )
    return llama_like.decoder(
        architecture="qwen", qkv_bias=True, **llama_like.sizes(same, positions=2048)
    )


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    found = llama_like.shared(model)
    for key in ("num_key_value_heads", "rope_scaling", "max_position_embeddings", "hidden_act"):
        del found[key]
    return found | {
        "architectures": ["QWenLMHeadModel"],
        "intermediate_size": 2 * model.intermediate_size,
        "seq_length": model.seq_length,
        "layer_norm_epsilon": found.pop("rms_norm_eps"),
        "rotary_emb_base": found.pop("rope_theta"),
        "kv_channels": found.pop("head_dim"),
    }


QWEN = Architecture(
    "qwen",
    read,
    NAMES,
    write,
    no_effect={
        "attn_dropout_prob": TRAINING,
        "emb_dropout_prob": TRAINING,
        "bf16": KERNEL,
        "fp16": KERNEL,
        "fp32": KERNEL,
        "max_position_embeddings": "seq_length is what it was trained on",
        "softmax_in_fp32": KERNEL,
        "onnx_safe": KERNEL,
        "use_cache_kernel": KERNEL,
        "use_cache_quantization": KERNEL,
        "use_dynamic_ntk": "of texts longer than seq_length",
        "use_flash_attn": KERNEL,
        "use_logn_attn": "of texts longer than seq_length",
    },
)
