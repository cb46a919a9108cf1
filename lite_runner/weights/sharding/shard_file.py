"""The file of one rank's shards."""

from __future__ import annotations

import re
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.checkpoint import is_not_weight
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.hugging_face import check_tied_head
from lite_runner.weights.formats.mindformers import canonical_name
from lite_runner.weights.formats.safetensors_file import open_safetensors
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.sharding.shard_set import COPY_AGAIN
from lite_runner.weights.tensor import LazyTensor

_SUFFIXES = (".ckpt", ".safetensors")


def last_checkpoint(folder: Path) -> Path:
    """The latest of a training's checkpoints, by the numbers in their names."""
    files = [item for item in folder.iterdir() if item.suffix in _SUFFIXES and item.is_file()]
    if not files:
        raise ArtifactError(
            f"{folder}: the folder holds no .ckpt and no .safetensors file", COPY_AGAIN
        )
    return max(files, key=lambda file: _natural(file.name))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(digits or 0), text) for digits, text in re.findall(r"(\d{1,18})|(\D+)", name)]


def open_shard(file: Path, model: Decoder | None) -> dict[str, LazyTensor]:
    """The tensors of one rank under the model's names; training state is left out.

    Without a model, the tensors of a MindSpore file as they are.
    """
    if file.suffix == ".safetensors":
        stored = open_safetensors(file, is_not_weight)
    else:
        stored = open_ckpt(file)
    found = {canonical_name(name): tensor for name, tensor in stored.items()}
    found = {name: tensor for name, tensor in found.items() if not is_not_weight(name)}
    if model is not None and model.tie_word_embeddings and "lm_head.weight" in found:
        head, embedding = (
            found.pop("lm_head.weight"),
            found.get(next(iter(expected_tensors(model)))),
        )
        if embedding is not None:
            check_tied_head(head, embedding, str(file))
    return found
