"""Makes tests/fixtures/config_classes.json: the fields of transformers' config class of each family
with their defaults, and the other names that it reads them by.

Run it again for a new family or a new transformers; tests/architectures/test_fields.py then
fails for every field that nobody decided on. Needs: transformers, and numpy for lite_runner.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from lite_runner.architectures import KNOWN  # noqa: E402

# What the published classes of Llama's descendants share.
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_NEWER = {"num_key_value_heads": None, "pretraining_tp": 1}
_NEWER |= {"rope_theta": 10000.0, "rope_scaling": None}
# Families whose class comes with the checkpoint, as {"aliases": {}, "defaults": {}}.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "chatglm": {
        "aliases": {},
        "defaults": {
            "num_layers": 28,
            "padded_vocab_size": 65024,
            "hidden_size": 4096,
            "ffn_hidden_size": 13696,
            "kv_channels": 128,
            "num_attention_heads": 32,
            "seq_length": 2048,
            "hidden_dropout": 0.0,
            "classifier_dropout": None,
            "attention_dropout": 0.0,
            "layernorm_epsilon": 1e-5,
            "rope_ratio": 1,
            "rmsnorm": True,
            "apply_residual_connection_post_layernorm": False,
            "post_layer_norm": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "bias_dropout_fusion": True,
            "multi_query_attention": False,
            "multi_query_group_num": 1,
            "apply_query_key_layer_scaling": True,
            "attention_softmax_in_fp32": True,
            "fp32_residual_connection": False,
            "quantization_bit": 0,
            "pre_seq_len": None,
            "prefix_projection": False,
        },
    },
    "chatglm_6b": {
        "aliases": {},
        "defaults": {
            "vocab_size": 150528,
            "hidden_size": 4096,
            "num_layers": 28,
            "num_attention_heads": 32,
            "layernorm_epsilon": 1e-05,
            "use_cache": False,
            "bos_token_id": 150004,
            "eos_token_id": 150005,
            "mask_token_id": 150000,
            "gmask_token_id": 150001,
            "pad_token_id": 0,
            "max_sequence_length": 2048,
            "inner_hidden_size": 16384,
            "position_encoding_2d": True,
            "quantization_bit": 0,
            "pre_seq_len": None,
            "prefix_projection": False,
        },
    },
    **{
        name: {"aliases": {}, "defaults": _LLAMA | defaults}
        for name, defaults in {
            "baichuan": {"vocab_size": 125696, "z_loss_weight": 0},
            "internlm": {"bias": True, "rotary": {"base": 10000, "type": "dynamic"}},
            "internlm2": _NEWER | {"bias": True, "attn_implementation": None},
            "minicpm": {
                **_NEWER,
                "attention_bias": False,
                "attention_dropout": 0.0,
                "scale_emb": 1,
                "dim_model_base": 1,
                "scale_depth": 1,
                "tie_word_embeddings": True,
            },
        }.items()
    },
    "telechat": {
        "aliases": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        "defaults": {
            "vocab_size": 160256,
            "hidden_size": 4096,
            "n_layer": 30,
            "n_head": 32,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "apply_residual_connection_post_layernorm": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "ffn_hidden_size": 12288,
            "training_seqlen": 8192,
            "logn": True,
            "embed_layernorm": False,
        },
    },
    "telechat3": {
        "aliases": {},
        "defaults": _LLAMA
        | _NEWER
        | {"head_dim": None, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
    },
    "qwen": {
        "aliases": {},
        "defaults": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "emb_dropout_prob": 0.0,
            "attn_dropout_prob": 0.0,
            "layer_norm_epsilon": 1e-6,
            "initializer_range": 0.02,
            "max_position_embeddings": 8192,
            "scale_attn_weights": True,
            "use_cache": True,
            "bf16": False,
            "fp16": False,
            "fp32": False,
            "kv_channels": 128,
            "rotary_pct": 1.0,
            "rotary_emb_base": 10000,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
            "use_flash_attn": "auto",
            "intermediate_size": 22016,
            "no_bias": True,
            "tie_word_embeddings": False,
            "use_cache_quantization": False,
            "use_cache_kernel": False,
            "softmax_in_fp32": False,
        },
    },
}


def described(model_type: str) -> dict[str, Any]:
    """The fields of a config class; `default_theta` is not a field, but what rope_theta is."""
    config = CONFIG_MAPPING[model_type]
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    if "rope_parameters" in defaults:
        theta = getattr(config, "default_theta", 10000.0)
        # Gemma 3 has another one for layers with a window.
        defaults["rope_theta"] = theta["global"] if isinstance(theta, dict) else theta
    # A class may declare a field by its older name, and map that to the newer one.
    aliases = {
        name if field in defaults else field: field if field in defaults else name
        for name, field in config.attribute_map.items()
    }
    return {"aliases": aliases, "defaults": defaults}


def main() -> None:
    classes = {
        name: described(name) if name in CONFIG_MAPPING else ELSEWHERE[name]
        for name in sorted(name for name, one in KNOWN.items() if one.write is not None)
    }
    text = json.dumps({"transformers": transformers.__version__, "classes": classes}, indent=1)
    target = ROOT / "tests" / "fixtures" / "config_classes.json"
    target.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
