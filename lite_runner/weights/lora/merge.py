"""A model with one adapter merged into its weights: W + scale * B A, computed on reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import can_untie_head, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.lora.adapter import Adapter, LoraPair
from lite_runner.weights.lora.target_modules import HEAD, TargetModule, sites
from lite_runner.weights.tensor import LazyTensor, narrowed

_HEAD_WEIGHT = f"{HEAD}.weight"


def merged_model(model: Decoder, adapter: Adapter) -> Decoder:
    """The model of the merged tensors.

    A tied head becomes untied if the adapter changes either the head or the embedding.
    Raises ArtifactError for bloom and gpt2, whose networks have no such head.
    """
    embedding = parameters(model)[0].name
    if not model.tie_word_embeddings or not {embedding, _HEAD_WEIGHT} & adapter.pairs.keys():
        return model
    if not can_untie_head(model):
        raise ArtifactError(
            f"adapter {adapter.name}: changes the embedding or the head alone, and"
            f" {model.architecture} has one tensor for both, so it cannot be merged",
            "run it beside its base: run_mode=slora",
        )
    return replace(model, tie_word_embeddings=False)


def merged(
    tensors: Mapping[str, LazyTensor], adapter: Adapter, model: Decoder
) -> dict[str, LazyTensor]:
    """The tensors of `merged_model`, from all of the base `model`'s; each keeps its type.

    The sum is computed in float32 and rounded once. Raises ArtifactError if the adapter is of
    another base or changes nothing; reading does if a sum is not finite in the type.
    """
    adapter.check_effective()
    adapter.check_copies(tensors)
    result = dict(tensors)
    if model.tie_word_embeddings and not merged_model(model, adapter).tie_word_embeddings:
        result[_HEAD_WEIGHT] = tensors[parameters(model)[0].name]
    for site in sites(model):
        if site.weight in adapter.pairs:
            pair, base = adapter.pairs[site.weight], result[site.weight]
            read = partial(_sum, base, pair, site, adapter.name)
            result[site.weight] = LazyTensor(base.shape, base.dtype, read)
    return result


def _sum(base: LazyTensor, pair: LoraPair, site: TargetModule, name: str) -> NDArray[Any]:
    a, b = pair.values()
    with np.errstate(over="ignore", invalid="ignore"):
        total = a.T @ b.T if site.transposed else b @ a
        total += base.float32()
        stored = narrowed(total, base.dtype)
    if not np.isfinite(total).all() or (base.dtype == "F16" and not np.isfinite(stored).all()):
        raise ArtifactError(
            f"adapter {name}: {site.weight} merged with it has values that are no number, or too "
            f"large for {base.dtype}",
            "the adapter's weights are damaged, or it was trained on another base",
        )
    return stored
