"""Descriptions in manifests: what was written is read, in today's form and in the earlier one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lite_runner.architectures.plain import FlatModel, StoredDecoder, decoder_of, to_plain
from lite_runner.architectures.spec import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Norm,
    RopeScaling,
    Rotary,
)
from lite_runner.config.fields import Fault, read
from tests import frozen

RMS = Norm("rms", 1e-6)
FULL = Block(
    RMS,
    Attention(4, 2, 8, Rotary(1e6, RopeScaling("yarn", 4.0, 64, truncate=False)), qk_norm=RMS),
    FeedForward(48, gated=True, bias=True),
)
SLIDING = replace(FULL, attention=replace(FULL.attention, window=7))
MIXED = Decoder("llama", 96, 32, 64, (FULL, SLIDING, SLIDING), RMS, False, eos_token_id=(1, 2))


def from_plain(plain: Any) -> Decoder:
    """As manifests are read."""
    faults: list[Fault] = []
    stored = read(plain, StoredDecoder | FlatModel, "model", faults)
    if faults:
        raise ValueError(faults[0].text)
    return decoder_of(stored)


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


SIZES = {
    "family": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "seq_length": 64,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_layers": 10**12}, "layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"n_kv_heads": 3}, "do not divide"),
        ({"head_dim": 7}, "even"),
        ({"family": "gpt2", "hidden_size": 64}, "4 heads of 8 make 32"),
        ({"family": "zzz"}, "'zzz' is not known"),
        ({"norm_eps": -1.0}, "eps"),
        ({"theta": 0.0}, "theta"),
        ({"intermediate_size": -2}, "width"),
        ({"eos_token_id": [-7]}, "special token"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"more": 1}, "more"),
    ],
)
def test_sizes_that_no_model_has(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        from_plain({**SIZES, **change})
