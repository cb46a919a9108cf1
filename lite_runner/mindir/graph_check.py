"""Infers a model's sizes from a graph's parameters and compares them with a description.

Our and MindFormers' parameter names are recognized, with any prefix; others are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from lite_runner.architectures import Architecture, architecture_of
from lite_runner.architectures.naming import Part, Role
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import TensorSpec
from lite_runner.weights.layouts import expected_tensors

_EMBEDDING = re.compile(
    r"(?:^|\.)(?:tok_embeddings\.embedding_weight|word_embedding\.embedding_table"
    r"|embedding\.weight|table)$"
)
_LAYER = re.compile(r"(?:^|\.)(?:blocks|layers)\.(\d+)\.")
_CACHE = re.compile(r"(?:^|\.)(?:keys|values|key_past|value_past)$")
_VALUES = re.compile(r"(?:^|\.)(?:values|value_past)$")


def sizes_of(
    architecture: Architecture,
    parameters: Sequence[TensorSpec],
    constants: Iterable[tuple[int, ...]],
) -> dict[str, int]:
    """The sizes of a graph's model by their names in `model.model_config`.

    `constants`: integer tuples in the graph, some of which are shapes. Raises ArtifactError if the
    embedding, a layer or the number of heads cannot be identified.
    """
    shapes = {one.name: one.shape for one in parameters}
    tables = [shape for name, shape in shapes.items() if _EMBEDDING.search(name)]
    layers = {int(found[1]) for name in shapes if (found := _LAYER.search(name))}
    wide = [shapes[name] for name in shapes if name.endswith(_feed_forward(architecture))]
    if not tables or not layers or not wide or len(tables[0]) != 2:
        raise ArtifactError(
            f"its sizes cannot be inferred, or it is no {architecture.name}", _NAME_IT
        )
    vocab, hidden = tables[0]
    # head_dim: the last axis of the value cache, else of a reshape target [.., heads, head_dim].
    dims = {shape[-1] for name, shape in shapes.items() if _VALUES.search(name)} or {
        one[3] for one in constants if len(one) == 4 and one[3] > 1 and one[2] * one[3] == hidden
    }
    if len(dims) != 1:
        raise ArtifactError("its number of heads cannot be inferred", _NAME_IT)
    head_dim = dims.pop()
    width = math.prod(wide[0]) // hidden
    # Key/value heads: from the rows of the key weight, if its name is known.
    key = (_suffix(architecture, "key", "weight"), ".wk.weight")  # MindFormers', ours
    keys = [math.prod(shape) for name, shape in shapes.items() if name.endswith(key)]
    told = {
        "head_dim": head_dim,
        "intermediate_size": width,
        "expand_ratio": width // hidden,
        **({"n_kv_heads": keys[0] // hidden // head_dim} if keys else {}),
    }
    assert architecture.mindformers is not None
    names = architecture.mindformers.sizes
    if not told.keys() >= {*names.values()}:
        raise ArtifactError("its number of key/value heads cannot be inferred", _NAME_IT)
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_layers": max(layers) + 1,
        "num_heads": hidden // head_dim,
        **{theirs: told[ours] for theirs, ours in names.items()},
    }


_NAME_IT = "name the exported model, e.g. model_name=bloom_560m"


def has_names_of(architecture: Architecture, parameters: Iterable[TensorSpec]) -> bool:
    """Whether a feed-forward weight has the architecture's name."""
    return any(one.name.endswith(_feed_forward(architecture)) for one in parameters)


def _gated(architecture: Architecture) -> bool:
    return "gate" in architecture.names


def _feed_forward(architecture: Architecture) -> tuple[str, ...]:
    """Name suffixes of a layer's first feed-forward weight (the gate if gated)."""
    if not architecture.names:  # a custom network: names are unknown
        return ()
    if _gated(architecture):
        return (_suffix(architecture, "gate", "weight"), ".w1.weight")  # MindFormers', ours
    return (_suffix(architecture, "up", "weight"), ".up.weight")


def _suffix(architecture: Architecture, role: Role, kind: Part) -> str:
    return f".{architecture.names[role].mindformers.rpartition('.')[2]}.{kind}"


def mismatches(
    model: Decoder, parameters: Sequence[TensorSpec], *, cache_rows: int | None
) -> list[str]:
    """Mismatches of a graph's `parameters` and the model, "name: got .., expected .."; at most 5.

    `cache_rows`: rows times positions of the graph's cache; None without one.
    """
    faults = (
        f"{name}: got {got}, expected {expected}"
        for name, got, expected in _comparisons(model, parameters, cache_rows)
        if got != expected
    )
    return list(dict.fromkeys(faults))[:5]


def _comparisons(
    model: Decoder, parameters: Sequence[TensorSpec], cache_rows: int | None
) -> Iterator[tuple[str, object, object]]:
    shapes = {one.name: tuple(size for size in one.shape if size != 1) for one in parameters}
    layers = {int(found[1]) for name in shapes if (found := _LAYER.search(name))}
    if layers:
        yield "num_layers", max(layers) + 1, model.num_layers
    wide = model.intermediate_size * model.hidden_size
    architecture = architecture_of(model)
    feed_forward = _feed_forward(architecture)
    for name, shape in shapes.items():
        size = math.prod(shape)
        if _EMBEDDING.search(name) and len(shape) == 2:
            yield "vocab_size", shape[0], model.vocab_size
            yield "hidden_size", shape[1], model.hidden_size
        elif name.endswith(feed_forward):
            yield "elements of a feed-forward weight", size, wide
        elif _CACHE.search(name) and cache_rows is not None:
            expected = cache_rows * model.n_kv_heads * model.head_dim
            yield "elements of a layer's cache", size, expected
    if architecture.names:
        query = _suffix(architecture, "query", "weight")
        if any(name.endswith(query) for name in shapes):
            bias = _suffix(architecture, "query", "bias")
            biased = any(name.endswith(bias) for name in shapes)
            yield "qkv_has_bias", biased, model.attention.qkv_bias
    canonical = expected_tensors(model)
    for name, shape in shapes.items():
        for start in (0, *(found.end() for found in re.finditer(r"\.", name))):
            if (wanted := canonical.get(name[start:])) is not None:
                yield name, shape, tuple(size for size in wanted if size != 1)
                break
