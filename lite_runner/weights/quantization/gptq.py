"""Calibrated quantization to 4 bits: GPTQ, a layer at a time.

Of the inputs x that a text gives a matrix, the gram matrix (sum of x x^T) says what an error of a
weight costs. Columns are rounded one after the other, those with the largest inputs first, and the
error of each is made up for by those that are left. The inputs are those that come out of the
layers before, quantized.

E. Frantar et al., GPTQ: Accurate Post-Training Quantization, arXiv:2210.17323.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.quantization import Quantization, schemes
from lite_runner.architectures.reference import forward
from lite_runner.architectures.spec import Block, Decoder
from lite_runner.weights.quantization.quantize import dequantized
from lite_runner.weights.quantization.quantized import (
    QuantizedTensor,
    packed,
    quantize,
    quantize_around_zero,
)
from lite_runner.weights.tensor import LazyIntegers, LazyTensor

Floats = NDArray[np.float32]
DAMPING = 0.01  # of the mean of the gram's diagonal, added to it
SCALE_BYTES = 2  # of a group in the form of compressed-tensors
BLOCK = 128  # columns whose errors reach the rest together


def gptq(weight: Floats, gram: NDArray[np.float64], nearest: QuantizedTensor) -> QuantizedTensor:
    """The matrix [out, in] in 4 bits, for inputs with this gram matrix [in, in].

    Scales and minimums are those of the `nearest` integers: whatever the order of the
    columns, the groups stay as they lie.
    """
    if not gram.any():  # of an expert that no token was sent to
        return nearest
    diagonal = np.diagonal(gram)
    order = np.argsort(-diagonal, kind="stable")
    damped = gram + np.diag((diagonal == 0) + DAMPING * diagonal.mean())
    inverse = np.linalg.inv(damped[order][:, order])
    upper = np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)
    # All by columns, which lie together so.
    left = np.ascontiguousarray(weight.T[order])
    scales = np.ascontiguousarray(nearest.scales.astype(np.float32).T)
    minimums = np.ascontiguousarray(nearest.smallest.T)
    inverses = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 1e-38)
    codes = np.empty(left.shape, np.uint8)
    for begin in range(0, len(order), BLOCK):
        end = min(begin + BLOCK, len(order))
        errors = np.empty((end - begin, len(weight)), np.float32)
        for at in range(begin, end):
            place = order[at] // nearest.group
            q = np.clip(np.rint((left[at] - minimums[place]) * inverses[place]), 0, 15)
            error = (left[at] - (scales[place] * q + minimums[place])) / upper[at, at]
            left[at + 1 : end] -= upper[at, at + 1 : end, None] * error
            codes[order[at]], errors[at - begin] = q, error
        left[end:] -= upper[begin:end, end:].T @ errors
    return replace(nearest, values=packed(np.ascontiguousarray(codes.T)))


def calibrated(
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    quantization: Quantization,
    texts: NDArray[np.int32],
    *,
    around_zero: bool,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, LazyTensor]:
    """The tensors of a model with its linear layers as of `gptq`, for the inputs that the token ids
    of `texts` [n, T] give them; all else is as it was, and so are integers of the same form.

    `around_zero`: in the form of `quantize_around_zero`. A layer at a time is in memory as floats,
    beside its inputs and what is quantized. `advance` is told of each layer. Raises ArtifactError.
    """
    wanted, table = schemes(model, quantization), parameters(model)
    found = dict(tensors)
    states: list[Floats | None] = [None] * len(texts)
    for index, block in enumerate(model.blocks):
        ours = [one for one in table if one.layer == index]
        layer = _Layer(model, block, {one: tensors[one.name] for one in ours}, tensors)
        for text, state in zip(texts, states, strict=True):
            layer.run(text, state)
        for one in ours:
            held = tensors[one.name].integers
            same = held is not None and held.scheme == wanted.get(one.name)
            if same and not around_zero:
                continue  # as they are, they have no error
            if one.name in wanted and one.is_linear:
                matrix, scheme = layer.matrix(one), wanted[one.name]
                if around_zero:
                    nearest = quantize_around_zero(matrix.values, scheme.group, one.name)
                    scheme = replace(scheme, group_bytes=SCALE_BYTES)
                else:
                    nearest = quantize(matrix.values, 4, scheme.group, one.name)
                exact = gptq(matrix.values, matrix.gram, nearest)
                matrix.replace(exact.float32())
                integers = LazyIntegers(scheme, partial(_same, exact), True)
                read = partial(dequantized, integers, one.transposed)
                shape = tensors[one.name].shape
                found[one.name] = LazyTensor(shape, "F32", read, integers=integers)
        states = [layer.run(text, state) for text, state in zip(texts, states, strict=True)]
        advance(1)
    return found


def _same(matrix: QuantizedTensor) -> QuantizedTensor:
    return matrix


class _Layer:
    """A layer of a model as a model of its own, which `reference.forward` computes."""

    def __init__(
        self,
        model: Decoder,
        block: Block,
        own: Mapping[Parameter, LazyTensor],
        tensors: Mapping[str, LazyTensor],
    ) -> None:
        self._operands = {_key(one): _operand(one, tensor) for one, tensor in own.items()}
        alone = replace(
            model,
            blocks=(block,),
            norm=None,
            tie_word_embeddings=True,
            logits_scaling=1.0,
            logits_softcap=None,
        )
        later = replace(alone, embedding_scale=1.0, learned_positions=False, embedding_norm=None)
        self._first, self._later = alone, later
        self._tensors = tensors

    def matrix(self, parameter: Parameter) -> _Matrix:
        found = self._operands[_key(parameter)]
        assert isinstance(found, _Matrix)
        return found

    def run(self, tokens: NDArray[np.int32], state: Floats | None) -> Floats:
        """What the layer makes of its inputs; of the first layer (None) they are `tokens`."""
        model = self._first if state is None else self._later
        table = parameters(model)
        ends = _State(self._tensors[table[0].name].float32() if state is None else state, state)
        operands: dict[str, Any] = {}
        for one in table:
            if one.layer is not None:
                operands[one.name] = self._operands[_key(one)]
            elif one.role == "embedding":
                operands[one.name] = ends
            else:  # before the first layer
                operands[one.name] = self._tensors[one.name].float32()
        forward(model, operands, tokens)
        return ends.result


def _key(one: Parameter) -> tuple[Any, ...]:
    return one.role, one.kind, one.expert


def _operand(one: Parameter, tensor: LazyTensor) -> Any:
    values = tensor.float32()
    if not one.is_linear:
        return values
    return _Matrix(np.ascontiguousarray(values.T) if one.transposed else values)


class _Operand:
    """What stands for an array [out, in] in `reference.forward`: products with it are its own."""

    __array_ufunc__ = None  # so that `array @ operand` is left to it

    def astype(self, dtype: object) -> _Operand:
        return self

    @property
    def T(self) -> _Operand:
        return self


class _Matrix(_Operand):
    """A matrix [out, in] that adds up the gram matrix of its inputs."""

    def __init__(self, values: Floats) -> None:
        self.values = values
        self.gram = np.zeros((values.shape[1], values.shape[1]))
        self._adds = True

    def replace(self, values: Floats) -> None:
        """Compute with other values from now on, and add nothing up."""
        self.values, self._adds = values, False
        self.gram = np.empty((0, 0))

    def __rmatmul__(self, x: NDArray[Any]) -> Floats:
        inputs = x.astype(np.float32)
        if self._adds:
            self.gram += inputs.T @ inputs
        return inputs @ self.values.T


class _State(_Operand):
    """The embedding of a layer's model, which is its head too: what goes in, and what comes out."""

    def __init__(self, values: Floats, state: Floats | None) -> None:
        self._values, self._embeds = values, state is None
        self.result = values

    def __getitem__(self, tokens: NDArray[np.int32]) -> Floats:
        return self._values[tokens] if self._embeds else self._values

    def __rmatmul__(self, x: NDArray[Any]) -> Floats:
        self.result = x.astype(np.float32)
        return self.result
