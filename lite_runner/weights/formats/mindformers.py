"""MindFormers' checkpoints: names, and fused tensors, to and from the canonical ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lite_runner.architectures import Parameter
from lite_runner.architectures.spec import Decoder
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.fused import by_name, fuse, separated, split, stacked
from lite_runner.weights.formats.hugging_face import (
    check_tied_head,
    from_hugging_face,
    full_name,
    shapes_in_files,
    with_normed_rows,
)
from lite_runner.weights.layouts import check_tensors, expected_tensors


def stored_name(parameter: Parameter) -> str:
    """The name of the tensor that holds a parameter."""
    return parameter.stored or parameter.name


def canonical_name(name: str) -> str:
    """The name of a tensor that MindFormers wrote, without the prefix that some of them have."""
    # Its BLOOM with a language-model head saves everything below `transformer.`, and its conversion
    # calls the head of Hugging Face's `head`.
    name = name.removeprefix("transformer.")
    if name == "embedding.embedding_table":  # of ChatGLM2, before release 1.1
        return "embedding.embedding_weight"
    return "lm_head.weight" if name == "head.weight" else name


def shapes_in_mindformers(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Name, as `canonical_name` gives it -> shape of every tensor of a checkpoint."""
    return {
        canonical_name(name): (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        for name, parts in by_name(model, stored_name).items()
    }


def with_canonical_names(
    found: Mapping[str, LazyTensor], config: Decoder, where: str
) -> dict[str, LazyTensor]:
    """`found` by canonical names, whether stored by those of Hugging Face or of MindFormers."""
    if config.joins is not None:  # MindFormers' checkpoints have none
        return from_hugging_face(found, config, where)
    found = separated(found, config, where)
    theirs, stored = shapes_in_files(config), shapes_in_mindformers(config)
    tensors = {canonical_name(name): tensor for name, tensor in found.items()}
    # A file of ours, such as one merged from shards, has unfused tensors.
    expected = max(stored, expected_tensors(config), key=lambda one: len(one.keys() & tensors))
    named = sum(full_name(name, theirs) in theirs for name in found)
    if named > len(expected.keys() & tensors):
        return from_hugging_face(found, config, where)
    head = None if "lm_head.weight" in expected else tensors.pop("lm_head.weight", None)
    check_tensors({name: tensor.shape for name, tensor in tensors.items()}, expected, where)
    if head is not None:
        check_tied_head(head, tensors[next(iter(expected))], where)
    if expected is stored:
        tensors = from_mindformers(tensors, config)
    if config.normed_head:
        tensors["lm_head.weight"] = with_normed_rows(tensors["lm_head.weight"])
    return {name: tensors[name] for name in expected_tensors(config)}


def from_mindformers(found: Mapping[str, LazyTensor], model: Decoder) -> dict[str, LazyTensor]:
    """Canonical tensors from those `found` under the names of `shapes_in_mindformers`."""
    return {
        part.name: split(found[canonical_name(name)], part, model)
        if part.stored and not _alone(parts)
        else found[canonical_name(name)]
        for name, parts in by_name(model, stored_name).items()
        for part in parts
    }


def _alone(parts: Sequence[Parameter]) -> bool:
    """True for a tensor that Hugging Face fuses with others, and MindFormers does not."""
    return len(parts) == 1 and parts[0].part is not None


def to_mindformers(tensors: Mapping[str, LazyTensor], model: Decoder) -> dict[str, LazyTensor]:
    """Canonical tensors under MindFormers' names, with a tied head if there is one."""
    table = by_name(model, stored_name)
    named = {
        name: fuse(parts, [tensors[part.name] for part in parts], model)
        if parts[0].stored and not _alone(parts)
        else tensors[parts[0].name]
        for name, parts in table.items()
    }
    known = {part.name for parts in table.values() for part in parts}
    others = {name: tensor for name, tensor in tensors.items() if name not in known}
    return stacked(named | others, model)
