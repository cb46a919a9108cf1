"""A model description to and from plain JSON types, for export manifests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from lite_runner.architectures import KNOWN, custom_network
from lite_runner.architectures.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE
from lite_runner.architectures.spec import Block, Decoder
from lite_runner.records import dataclass


@dataclass(frozen=True)
class EqualBlocks(Block):
    """A run of equal blocks."""

    layers: int = dataclasses.field(kw_only=True)


@dataclass(frozen=True)
class StoredDecoder(Decoder):
    """The type of a serialized description, for the reader of typed dataclasses."""

    blocks: tuple[EqualBlocks, ...]


def serialize(model: Decoder) -> dict[str, Any]:
    """The description; runs of equal blocks are stored once, with their count."""
    plain = dataclasses.asdict(dataclasses.replace(model, blocks=()))
    plain["blocks"] = [
        {"layers": len(list(same)), **dataclasses.asdict(block)}
        for block, same in groupby(model.blocks)
    ]
    return plain


def decoder_of(stored: StoredDecoder) -> Decoder:
    """The decoder of a description whose types are right.

    Raises ValueError for numbers that no model has, or that contradict each other.
    """
    given = {field.name: getattr(stored, field.name) for field in dataclasses.fields(stored)}
    _check_layers(min((one.layers for one in stored.blocks), default=0))
    _check_layers(sum(one.layers for one in stored.blocks))
    given["blocks"] = tuple(block for one in stored.blocks for block in [_block(one)] * one.layers)
    model = Decoder(**given)
    if errors := list(_errors(model)):
        raise ValueError("; ".join(errors))
    return model


def _block(stored: EqualBlocks) -> Block:
    fields = dataclasses.fields(Block)
    return Block(**{field.name: getattr(stored, field.name) for field in fields})


def _check_layers(layers: int) -> None:
    if not 1 <= layers <= MAX_LAYERS:
        raise ValueError(f"model: {layers} layers, expected 1 to {MAX_LAYERS}")


def _errors(model: Decoder) -> Iterator[str]:
    """Validation errors of a model's numbers."""
    attention, sizes = model.attention, model.sizes()
    if model.architecture not in KNOWN:
        known = ", ".join(KNOWN)
        yield (
            f"model: architecture {model.architecture!r} is not known here, expected {known}, or "
            "one that plugins= registers"
        )
        return
    for name in ("vocab_size", "hidden_size", "seq_length", "num_heads", "n_kv_heads", "head_dim"):
        if not 1 <= sizes[name] <= MAX_SIZE:
            yield f"model: {name} is {sizes[name]}, expected 1 to {MAX_SIZE:,}"
            return  # the others follow from it
    if custom_network(model) is not None:  # whatever else these mean to it
        return
    for block in dict.fromkeys(model.blocks):
        yield from _block_errors(block, model)
    for layer, block in enumerate(model.blocks):
        if block.attention.borrowed is not None:
            yield from _lender_errors(model, layer, block.attention.borrowed)
    if model.side is not None and not 1 <= model.side.width <= MAX_SIZE:
        yield f"model: side.width is {model.side.width}, expected 1 to {MAX_SIZE:,}"
    norms = (model.norm, model.embedding_norm, attention.qk_norm)
    if any(norm is not None and not 0 < norm.eps < 1 for norm in norms):
        yield "model: eps of a norm is not between 0 and 1"
    if not 0 <= model.position_offset <= MAX_SIZE:
        yield f"model: position_offset is {model.position_offset}, expected 0 to {MAX_SIZE:,}"
    tokens = (*model.eos_token_id, model.bos_token_id, model.pad_token_id)
    if model.prefix is not None:
        tokens += (model.prefix.end_token_id, *model.prefix.mask_token_ids)
    if any(token is not None and not -1 <= token <= MAX_SIZE for token in tokens):
        yield f"model: a special token is not from 0 to {MAX_SIZE:,}"


def _lender_errors(model: Decoder, layer: int, borrowed: int) -> Iterator[str]:
    """Validation errors of a layer that borrows an earlier one's keys."""
    own = model.blocks[layer].attention
    lender = model.blocks[borrowed] if 0 <= borrowed < layer else None
    if lender is None or not lender.attends or lender.attention.borrowed is not None:
        yield f"model: layer {layer} takes the keys of {borrowed}, which lends none"
    elif (lender.attention.kv_heads, lender.attention.head_dim) != (own.kv_heads, own.head_dim):
        yield f"model: layer {layer} takes the keys of {borrowed}, whose heads are others"


def _block_errors(block: Block, model: Decoder) -> Iterator[str]:
    one = block.attention
    if not all(1 <= size <= MAX_SIZE for size in (one.heads, one.kv_heads, one.head_dim)):
        yield "model: heads of a layer, or their sizes, are not from 1 on"
    elif one.heads % one.kv_heads:
        yield f"model: {one.kv_heads} key/value heads do not divide {one.heads} heads of a layer"
    if one.rotary is not None and one.head_dim % 2:
        yield f"model: head_dim is {one.head_dim}, expected an even number with RoPE"
    if not 1 <= block.feed_forward.width <= MAX_SIZE:
        yield f"model: feed_forward.width is {block.feed_forward.width}, expected 1 to {MAX_SIZE:,}"
    experts = block.feed_forward.experts
    if experts is not None:
        if not 1 <= experts.count <= MAX_EXPERTS:
            yield f"model: {experts.count} experts, expected 1 to {MAX_EXPERTS:,}"
        if not 1 <= experts.chosen <= experts.count:
            yield f"model: {experts.chosen} of {experts.count} experts a token, expected fewer"
        if not 0 <= experts.shared <= MAX_SIZE:
            yield f"model: experts.shared is {experts.shared}, expected 0 to {MAX_SIZE:,}"
        if not 1 <= experts.chosen_groups <= experts.groups or experts.count % experts.groups:
            yield (
                f"model: {experts.chosen_groups} of {experts.groups} groups of {experts.count}"
                " experts, expected a divisor, and fewer"
            )
        elif not 1 <= experts.best_of_group <= experts.count // experts.groups or (
            experts.chosen > experts.count // experts.groups * experts.chosen_groups
        ):
            yield f"model: groups of experts are too small for {experts.chosen} experts a token"
    if one.window is not None and one.window < 1:
        yield f"model: window is {one.window}, expected at least 1"
    if one.clip is not None and not 0 < one.clip <= MAX_SIZE:
        yield f"model: clip is {one.clip}, expected a number above 0"
    norms = (block.norm, block.post_norm, block.sum_norm, block.out_norm)
    for norm in norms:
        if norm is not None and not 0 < norm.eps < 1:
            yield f"model: eps of a norm is {norm.eps}, expected a number between 0 and 1"
    kept = block.normed_residual
    if kept is not None and not 0 < kept <= MAX_SIZE:
        yield f"model: normed_residual is {kept}, expected a number above 0"
    if not any(norms):
        yield "model: a block has no norm"
    if one.rotary is not None:
        scaling = one.rotary.scaling
        dims = one.rotary.dims
        if dims is not None and (dims % 2 or not 2 <= dims <= one.head_dim):
            yield f"model: {dims} rotated dimensions, expected 2, 4, ... of {one.head_dim}"
        if one.rotary.theta <= 0:
            yield f"model: theta is {one.rotary.theta}, expected a number above 0"
        if scaling is not None and (scaling.factor <= 0 or scaling.original_seq_length < 1):
            yield (
                f"model: the scaling of RoPE is by {scaling.factor}, from "
                f"{scaling.original_seq_length} positions"
            )
