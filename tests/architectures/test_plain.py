"""Descriptions in manifests: what was written is read, in today's form and in the earlier one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lite_runner.architectures.plain import from_plain, to_plain
from lite_runner.architectures.spec import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Norm,
    RopeScaling,
    Rotary,
)
from tests import frozen

RMS = Norm("rms", 1e-6)
FULL = Block(
    RMS,
    Attention(4, 2, 8, Rotary(1e6, RopeScaling("yarn", 4.0, 64, truncate=False)), qk_norm=RMS),
    FeedForward(48, gated=True, bias=True),
)
SLIDING = replace(FULL, attention=replace(FULL.attention, window=7))
MIXED = Decoder("llama", 96, 32, 64, (FULL, SLIDING, SLIDING), RMS, False, eos_token_id=(1, 2))


@pytest.mark.parametrize("model", [MIXED, *map(frozen.description, frozen.cases())])
def test_what_is_written_is_read(model: Decoder) -> None:
    assert from_plain(json.loads(json.dumps(to_plain(model)))) == model


def test_neighbours_that_are_one_stand_once() -> None:
    assert [block["layers"] for block in to_plain(MIXED)["blocks"]] == [1, 2]


def test_the_flat_form_of_earlier_exports_is_read() -> None:
    model = frozen.description("qwen2")
    earlier = {
        "family": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "seq_length": model.seq_length,
        "norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_word_embeddings,
        "theta": model.rotary.theta if model.rotary else None,
        "rope_scaling": None,
        "qkv_has_bias": True,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_id),
        "pad_token_id": model.pad_token_id,
    }
    assert from_plain(earlier) == model


@pytest.mark.parametrize("layers", [0, -1, 10**9, True, "2"])
def test_a_number_of_layers_that_no_model_has(layers: Any) -> None:
    plain = to_plain(MIXED)
    plain["blocks"][0]["layers"] = layers
    with pytest.raises(ValueError, match="layers"):
        from_plain(plain)
