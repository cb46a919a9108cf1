"""Learned keys and values in front of every sequence's, as MindFormers' p-tuning v2 and prefix
tuning train them into a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import architecture_of, parameters
from lite_runner.architectures.settings import LearnedKeySettings
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import LEARNED_KEYS, open_with

if TYPE_CHECKING:
    from lite_runner.model import ModelFiles

_TABLE = "embedding.embedding_table"
_SCALE = np.float32(0.1)  # standard deviation of random ones


def with_learned_keys(files: ModelFiles, pet: LearnedKeySettings) -> ModelFiles:
    """The model with the learned keys of its checkpoint; random ones where its weights are.

    Raises ArtifactError where they are not as `pet` says.
    """
    expected = _shapes(files.model, pet)
    if files.path is None:
        found = {name: _random(shape, files.seed) for name, shape in expected.items()}
    else:
        _, stored = open_with(LEARNED_KEYS, files.path, files.model)
        matches = [match for match in map(LEARNED_KEYS.fullmatch, stored) if match]
        found = {_layer(match[1]): stored[match[0]] for match in matches if match[1] != "prefix"}
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if shapes != expected:
        raise ArtifactError(
            f"{files.path}: its learned keys are {shapes or 'missing'}, and pet_config (pet_type"
            f" {pet.pet_type}) expects {expected}",
            "pet_config as the checkpoint was trained with, or none for a base model",
        )
    model = replace(files.model, learned_keys=pet.pre_seq_len)
    return replace(files, model=model, learned_keys=found)


def learned_keys(
    tensors: Mapping[str, LazyTensor], model: Decoder, *, reproducible: bool = False
) -> NDArray[np.float32]:
    """Keys and values [layers, 2, kv_heads, tokens, head_dim]; `reproducible`: with the same bits
    on every processor, which NumPy's products and tanh have not."""
    product, tanh = (_product, _tanh) if reproducible else (np.matmul, np.tanh)
    numbers = tensors[_TABLE].float32().copy()
    for layer, follow in (("trans.0", tanh), ("trans.2", None)):
        if f"{layer}.weight" in tensors:
            numbers = product(numbers, tensors[f"{layer}.weight"].float32().T)
            numbers = numbers + tensors[f"{layer}.bias"].float32()
            numbers = numbers if follow is None else follow(numbers)
    both = numbers.reshape(len(numbers), model.num_layers, 2, -1)
    parameter = next(one for one in parameters(model) if one.role == "key")
    rows = architecture_of(model).stored_rows(parameter, model)
    if isinstance(rows, np.ndarray):  # files store key rows in another order
        both[:, :, 0] = both[:, :, 0][:, :, np.argsort(np.argsort(rows))]
    shape = (len(numbers), model.num_layers, 2, model.n_kv_heads, model.head_dim)
    return both.reshape(shape).transpose(1, 2, 3, 0, 4)


def _product(x: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """x @ weight, summed in float64 in the order of the columns of x."""
    total = np.zeros((len(x), weight.shape[1]))
    for column, row in zip(x.T.astype(np.float64), weight, strict=True):
        total += column[:, None] * row
    return total.astype(np.float32)


def _tanh(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """By operations of float64 that each processor rounds alike; within a bit of the nearest
    float32."""
    wide = np.clip(x.astype(np.float64), -20, 20)  # beyond it tanh is 1
    halvings = np.rint(wide * (2 / math.log(2)))
    rest = 2 * wide - halvings * math.log(2)
    exponential = np.ones_like(rest)
    for n in range(14, 0, -1):  # series of e^rest
        exponential = 1 + exponential * rest / n
    found = 1 - 2 / (np.ldexp(exponential, halvings.astype(np.int32)) + 1)
    square = wide * wide
    small = wide * (1 - square * (1 / 3 - square * (2 / 15)))
    return np.where(square < 1e-4, small, found).astype(np.float32)


def _layer(name: str) -> str:
    return name.replace("dense_in", "trans.0").replace("dense_out", "trans.2")


def _shapes(model: Decoder, pet: LearnedKeySettings) -> dict[str, tuple[int, ...]]:
    width = 2 * model.num_layers * model.n_kv_heads * model.head_dim
    inner = pet.projection_dim
    projection = {
        "trans.0.weight": (inner, width),
        "trans.0.bias": (inner,),
        "trans.2.weight": (width, inner),
        "trans.2.bias": (width,),
    }
    return {_TABLE: (pet.pre_seq_len, width)} | (projection if pet.prefix_projection else {})


def _random(shape: tuple[int, ...], seed: int) -> LazyTensor:
    def draw() -> NDArray[np.float32]:
        return np.random.default_rng(seed).standard_normal(shape, np.float32) * _SCALE

    return LazyTensor(shape, "F32", draw)
