"""Baichuan and Baichuan2: a Llama with fused q, k and v; the larger ones have ALiBi. Baichuan2's
head is normed: its rows are of length 1."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import llama_like
from lite_runner.architectures.architecture import Architecture
from lite_runner.architectures.fields import TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder

_OURS, _FUSED = "model.layers.{}.attention", "model.layers.{}.self_attn.W_pack"
NAMES: Names = {
    **llama_like.NAMES,
    "query": Name(f"{_OURS}.wq", _FUSED, 0),
    "key": Name(f"{_OURS}.wk", _FUSED, 1),
    "value": Name(f"{_OURS}.wv", _FUSED, 2),
}
NORMED_VOCABULARY = 125696  # of Baichuan2; nothing else in its config.json tells


def read(fields: Fields) -> Decoder:
    """From config.json; the models with ALiBi have a model_max_length alone."""
    fields.neutral(num_key_value_heads=fields.integer("num_attention_heads"))
    fields.neutral(tie_word_embeddings=False)
    alibi = fields.raw.get("max_position_embeddings") is None
    length = fields.integer("model_max_length", default=4096)
    same = fields.with_values(max_position_embeddings=length) if alibi else fields
    model = llama_like.decoder(architecture="baichuan", **llama_like.sizes(same, positions=4096))
    normed = model.vocab_size == NORMED_VOCABULARY
    model = dataclasses.replace(model, normed_head=normed)
    return llama_like.changed(model, {"rotary": None, "alibi": True}) if alibi else model


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    found = llama_like.shared(model)
    for key in ("num_key_value_heads", "head_dim", "rope_scaling"):
        del found[key]
    if model.attention.alibi:
        found["model_max_length"] = found.pop("max_position_embeddings")
        del found["rope_theta"]
    return found | {"architectures": ["BaichuanForCausalLM"]}


BAICHUAN = Architecture(
    "baichuan",
    read,
    NAMES,
    write,
    no_effect={
        "_from_model_config": "says where the files are from",
        "z_loss_weight": TRAINING,
    },
)
