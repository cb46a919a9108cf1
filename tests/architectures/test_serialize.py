"""Descriptions in manifests: what was written is read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lite_runner.architectures.llama_like import changed
from lite_runner.architectures.serialize import StoredDecoder, decoder_of, serialize
from lite_runner.architectures.spec import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Norm,
    RopeScaling,
    Rotary,
)
from lite_runner.config import Invalid, read
from tests import references
from tests.each import each
from tests.models import reference_model

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
    faults: list[Invalid] = []
    stored = read(plain, StoredDecoder, "model", faults)
    if faults:
        raise ValueError(faults[0].text)
    return decoder_of(stored)


def test_round_trip(subtests: pytest.Subtests) -> None:
    unrotated = changed(MIXED, {"rotary": None, "head_dim": 16})  # 64 numbers of a token of 32
    for case in ("mixed", "unrotated", *references.every()):
        models = {"mixed": MIXED, "unrotated": unrotated}
        model = models.get(case) or reference_model(case)
        with subtests.test(case=case):
            assert from_plain(json.loads(json.dumps(serialize(model)))) == model


def test_neighbours_that_are_one_stand_once() -> None:
    assert [block["layers"] for block in serialize(MIXED)["blocks"]] == [1, 2]


@pytest.mark.parametrize("layers", [0, -1, 10**9, True, "2"])
def test_a_number_of_layers_that_no_model_has(layers: Any) -> None:
    plain = serialize(MIXED)
    plain["blocks"][0]["layers"] = layers
    with pytest.raises(ValueError, match="layers"):
        from_plain(plain)


BLOCK = ("blocks", 0)
ORIGINAL = "original_seq_length"
SCALING: Any = {"type": "linear", "factor": 2.0, ORIGINAL: 8}


@each(
    ("path", "value", "told"),
    [
        ((*BLOCK, "layers"), 10**12, "layers"),
        (("hidden_size",), 0, "hidden_size"),
        ((*BLOCK, "attention", "kv_heads"), 3, "do not divide"),
        ((*BLOCK, "attention", "head_dim"), 7, "even"),
        ((*BLOCK, "attention", "clip"), -1.0, "clip is -1.0"),
        (("architecture",), "zzz", "'zzz' is not known"),
        (("norm", "eps"), -1.0, "eps"),
        ((*BLOCK, "attention", "rotary", "theta"), 0.0, "theta"),
        ((*BLOCK, "attention", "rotary", "scaling"), {**SCALING, "factor": 0.0}, "is by 0.0"),
        ((*BLOCK, "attention", "rotary", "scaling"), {**SCALING, ORIGINAL: 0}, "from 0 positions"),
        ((*BLOCK, "feed_forward", "width"), -2, "width"),
        (("eos_token_id",), [-7], "special token"),
        (("tie_word_embeddings",), 1, "tie_word_embeddings"),
        (("more",), 1, "more"),
    ],
)
def test_sizes_that_no_model_has(path: tuple[Any, ...], value: object, told: str) -> None:
    plain: Any = json.loads(json.dumps(serialize(reference_model("llama"))))
    inside = plain
    for one in path[:-1]:
        inside = inside[one]
    inside[path[-1]] = value
    with pytest.raises(ValueError, match=told):
        from_plain(plain)


@pytest.mark.parametrize("borrowed", [-1, 99])
def test_keys_of_a_layer_that_lends_none(borrowed: int) -> None:
    plain = serialize(reference_model("gemma4_sides"))
    plain["blocks"][-1]["attention"]["borrowed"] = borrowed
    with pytest.raises(ValueError, match="which lends none"):
        from_plain(plain)
