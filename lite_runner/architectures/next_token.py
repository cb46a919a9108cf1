"""A model's layer for multi-token prediction, as a model of its own.

Its input is a matrix of two vectors, each behind its norm: the embedding of a token, and the hidden
state of the token before, which is the model's behind its last norm, or the layer's own. One block
and a norm follow; embedding and head are the model's. After DeepSeek-V3's report, with the order of
its published weights: enorm and hnorm, eh_proj, shared_head; Qwen3-Next's are called mtp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError

T = TypeVar("T")
_LAYER = "model.layers.0."
# Names in files, below the layer's, and those of a model of this layer alone. Its copies of the
# embedding and the head are the model's, too (DeepSeek's README_WEIGHTS.md).
_HUGGING_FACE = {
    "shared_head.norm.weight": "model.norm.weight",
    **{f"{one}.weight": f"model.{one}.weight" for one in ("eh_proj", "enorm", "hnorm")},
}
_QWEN = {
    "norm.weight": "model.norm.weight",
    "fc.weight": "model.eh_proj.weight",
    "pre_fc_norm_embedding.weight": "model.enorm.weight",
    "pre_fc_norm_hidden.weight": "model.hnorm.weight",
}
_GGUF = {
    "nextn.shared_head_norm.weight": "output_norm.weight",
    **{f"nextn.{one}.weight": f"nextn.{one}.weight" for one in ("eh_proj", "enorm", "hnorm")},
}
_SHARED = re.compile(
    r"embed_tokens\.|(shared_head\.|lm_)head\.|nextn\.(embed_tokens|shared_head_head)\."
)


def next_token_layer(model: Decoder) -> Decoder | None:
    """The layer that predicts the token after the next, where files of a model's architecture may
    have one of attention and a feed-forward network."""
    blocks = [one for one in model.blocks if one.attends and one.only is None]
    if not (architecture_of(model).next_token_layers and blocks and model.norm):
        return None
    alone = replace(model, blocks=(blocks[-1],), joins=model.norm)
    return replace(alone, tie_word_embeddings=True, head_bias=False)


def in_hugging_face(found: Mapping[str, T], where: str) -> dict[str, T]:
    """The tensors of the first of such layers, by the names in a model of it alone. Raises
    ArtifactError where there is none."""
    if "mtp.fc.weight" in found:
        inner = _renamed(found, "mtp.layers.0.", {}, _LAYER)
        return inner | _renamed(found, "mtp.", _QWEN, None)
    prefix = _first(found, r"(model\.layers\.\d{1,5}\.)eh_proj\.weight", where)
    return _renamed(found, prefix, _HUGGING_FACE, _LAYER)


def in_gguf(found: Mapping[str, T], where: str) -> dict[str, T]:
    """The same of a GGUF file."""
    prefix = _first(found, r"(blk\.\d{1,5}\.)nextn\.eh_proj\.weight", where)
    return _renamed(found, prefix, _GGUF, "blk.0.")


def _first(found: Iterable[str], pattern: str, where: str) -> str:
    """The prefix of the first layer that has this tensor."""
    matches = (re.fullmatch(pattern, name) for name in found)
    prefixes = sorted((one[1] for one in matches if one), key=lambda one: (len(one), one))
    if not prefixes:
        raise no_layer(where)
    return prefixes[0]


def no_layer(where: str) -> ArtifactError:
    """The error of files without such a layer."""
    return ArtifactError(
        f"{where}: has no layer for multi-token prediction",
        "speculate=ngram drafts tokens without one",
    )


def _renamed(
    found: Mapping[str, T], prefix: str, names: Mapping[str, str], layer: str | None
) -> dict[str, T]:
    """The tensors below a prefix by other names; those not in `names` are of the `layer`, or left
    out."""
    renamed = {}
    for name, tensor in found.items():
        own = name.removeprefix(prefix)
        if own == name or _SHARED.match(own):
            continue
        if own in names:
            renamed[names[own]] = tensor
        elif layer is not None:
            renamed[layer + own] = tensor
    return renamed
