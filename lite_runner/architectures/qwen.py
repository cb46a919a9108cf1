"""Qwen, the first one: a Llama with biases of q, k and v, in names of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from lite_runner.architectures import GGUF, Architecture, llama, llama_like
from lite_runner.architectures.fields import KERNEL, TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder

_LAYER = "transformer.h.{}"


def _name(ours: str, theirs: str, part: int | None = None) -> Name:
    return Name(ours, theirs, part, stored=f"transformer.{ours}")


NAMES: Names = {
    "embedding": _name("wte.embedding_weight", "transformer.wte"),
    "query": _name("layers.{}.attention.wq", f"{_LAYER}.attn.c_attn", 0),
    "key": _name("layers.{}.attention.wk", f"{_LAYER}.attn.c_attn", 1),
    "value": _name("layers.{}.attention.wv", f"{_LAYER}.attn.c_attn", 2),
    "attention_out": _name("layers.{}.attention.wo", f"{_LAYER}.attn.c_proj"),
    "gate": _name("layers.{}.feed_forward.w1", f"{_LAYER}.mlp.w2"),
    "down": _name("layers.{}.feed_forward.w2", f"{_LAYER}.mlp.c_proj"),
    "up": _name("layers.{}.feed_forward.w3", f"{_LAYER}.mlp.w1"),
    "attention_norm": _name("layers.{}.attention_norm", f"{_LAYER}.ln_1"),
    "feed_forward_norm": _name("layers.{}.ffn_norm", f"{_LAYER}.ln_2"),
    "norm": _name("ln_f", "transformer.ln_f"),
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
    llama.mindformers(
        "QwenConfig",
        "QwenForCausalLM",
        "qwen_7b",
        partial(llama_like.decoder, architecture="qwen"),
        unread=frozenset({"kv_channels"}),
        translated=llama.TRANSLATED,
        translate=llama.translate,
    ),
    GGUF(
        {
            "seq_length": "context_length",
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
            "rotary_emb_base": "rope.freq_base",
            "kv_channels": "rope.dimension_count",
        },
        written=False,
    ),
    no_effect={
        **dict.fromkeys(("attn_dropout_prob", "emb_dropout_prob"), TRAINING),
        **dict.fromkeys(("bf16", "fp16", "fp32", "softmax_in_fp32", "onnx_safe"), KERNEL),
        **dict.fromkeys(("use_cache_kernel", "use_cache_quantization", "use_flash_attn"), KERNEL),
        **dict.fromkeys(("use_dynamic_ntk", "use_logn_attn"), "of texts longer than seq_length"),
        "max_position_embeddings": "seq_length is what it was trained on",
    },
)
