"""A model description to and from plain JSON types, for export manifests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from lite_runner.architectures.fields import MAX_LAYERS
from lite_runner.architectures.flat import ModelConfig
from lite_runner.architectures.spec import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Norm,
    RopeScaling,
    Rotary,
)


def to_plain(model: Decoder) -> dict[str, Any]:
    """The description; runs of equal blocks are stored once, with their count."""
    plain = dataclasses.asdict(dataclasses.replace(model, blocks=()))
    plain["blocks"] = [
        {"layers": len(list(same)), **dataclasses.asdict(block)}
        for block, same in groupby(model.blocks)
    ]
    return plain


def from_plain(raw: Mapping[str, Any]) -> Decoder:
    """The inverse of `to_plain`; also reads the flat form of earlier exports.

    Raises KeyError, TypeError or ValueError for anything else.
    """
    fields = dict(raw)
    fields["eos_token_id"] = tuple(fields["eos_token_id"])
    if "family" in fields:
        scaling = fields["rope_scaling"]
        fields["rope_scaling"] = None if scaling is None else RopeScaling(**scaling)
        return ModelConfig(**fields)
    blocks: tuple[Block, ...] = ()
    for one in fields["blocks"]:
        layers = one["layers"]
        if type(layers) is not int or not 1 <= layers <= MAX_LAYERS - len(blocks):
            raise ValueError(f"layers {layers!r}")
        blocks += (_block(one),) * layers
    fields["blocks"] = blocks
    fields["norm"] = Norm(**fields["norm"])
    fields["embedding_norm"] = _optional(fields["embedding_norm"])
    return Decoder(**fields)


def _block(raw: Mapping[str, Any]) -> Block:
    attention = dict(raw["attention"])
    if attention["rotary"] is not None:
        rotary = dict(attention["rotary"])
        if rotary["scaling"] is not None:
            rotary["scaling"] = RopeScaling(**rotary["scaling"])
        attention["rotary"] = Rotary(**rotary)
    attention["qk_norm"] = _optional(attention["qk_norm"])
    return Block(Norm(**raw["norm"]), Attention(**attention), FeedForward(**raw["feed_forward"]))


def _optional(raw: Mapping[str, Any] | None) -> Norm | None:
    return None if raw is None else Norm(**raw)
