"""Calibrated quantization to 4 bits: GPTQ, a layer at a time.

Of the inputs x that a text gives a matrix, the gram matrix (sum of x x^T) says what an error of a
weight costs. Columns are rounded one after the other, those with the largest inputs first, and the
error of each is made up for by those that are left. The inputs are those that come out of the
layers before, quantized.

E. Frantar et al., GPTQ: Accurate Post-Training Quantization, arXiv:2210.17323.
"""

from __future__ import annotations

import itertools
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.quantization import Quantization, schemes
from lite_runner.architectures.reference import forward
from lite_runner.architectures.spec import Block, Decoder
from lite_runner.errors import ArtifactError
from lite_runner.system.files import atomic_write, make_folder
from lite_runner.weights import LazyIntegers, LazyTensor
from lite_runner.weights.quantization.quantize import dequantized
from lite_runner.weights.quantization.quantized import (
    QuantizedTensor,
    packed,
    quantize,
    quantize_around_zero,
)

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
    kept: KeptLayers | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, LazyTensor]:
    """The tensors of a model with its linear layers as of `gptq`, for the inputs that the token ids
    of `texts` [n, T] give them; all else is as it was, and so are integers of the same form.

    `around_zero`: in the form of `quantize_around_zero`. Layers that are `kept` are not computed
    again. A layer at a time is in memory as floats, beside its inputs and what is quantized.
    `advance` is told of each layer. Raises ArtifactError and EnvironmentFault.
    """

    def nearest(matrix: _Matrix, group: int, name: str) -> QuantizedTensor:
        if around_zero:
            return quantize_around_zero(matrix.values, group, name)
        return quantize(matrix.values, 4, group, name)

    wanted = schemes(model, quantization)
    found = dict(tensors)
    done = kept.count if kept else 0
    for index, (layer, ours) in enumerate(layers_on(tensors, model, texts, whole=True, done=done)):
        before = kept.layer(index) if kept and index < done else {}
        quantized: dict[str, QuantizedTensor] = {}
        for one in ours:
            if one.name not in wanted or not one.is_linear:
                continue
            held, scheme = tensors[one.name].integers, wanted[one.name]
            if held is not None and held.scheme == scheme and not around_zero:
                continue  # as they are, they have no error
            matrix = layer.matrix(one)
            if kept and index < done:
                exact = kept.checked(before, one.name, matrix.values.shape)
            else:
                exact = gptq(matrix.values, matrix.gram, nearest(matrix, scheme.group, one.name))
            if around_zero:
                scheme = replace(scheme, group_bytes=SCALE_BYTES)
            quantized[one.name] = exact
            matrix.replace(exact.float32())
            integers = LazyIntegers(scheme, partial(_same, exact), True)
            read = partial(dequantized, integers, one.transposed)
            shape = tensors[one.name].shape
            found[one.name] = LazyTensor(shape, "F32", read, integers=integers)
        if kept and index >= done:
            kept.keep(index, quantized)
        advance(1)
    return found


class KeptLayers:
    """The quantized layers of a calibration that has not ended, in a folder, so that the next run
    goes on behind them."""

    def __init__(self, folder: Path, settings: str) -> None:
        """`settings`: of the run; a folder of others is emptied."""
        self._folder = folder
        said = folder / "settings"
        if not said.is_file() or said.read_text(encoding="utf-8") != settings:
            self.remove()
            make_folder(folder)
            said.write_text(settings, encoding="utf-8")

    @property
    def count(self) -> int:
        """Layers from the first on that are here."""
        return next(index for index in itertools.count() if not self._file(index).is_file())

    def layer(self, index: int) -> dict[str, QuantizedTensor]:
        """The matrices of a layer by name. Raises ArtifactError."""
        found: dict[str, QuantizedTensor] = {}
        try:
            with np.load(self._file(index), allow_pickle=False) as held:
                for key in held.files:
                    name, _, part = key.rpartition("|")
                    if part == "values":
                        low = held.get(f"{name}|minimums")
                        values, scales = held[key], held[f"{name}|scales"]
                        group = 2 * values.shape[1] // scales.shape[1]
                        zero = 8 if low is None else 0
                        found[name] = QuantizedTensor(4, group, values, scales, low, zero)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise self._broken(str(error)) from error
        return found

    def checked(
        self, layer: Mapping[str, QuantizedTensor], name: str, shape: tuple[int, ...]
    ) -> QuantizedTensor:
        """The matrix of that name. Raises ArtifactError."""
        found = layer.get(name)
        if found is None or found.shape != shape or not found.sound:
            raise self._broken(f"{name} is missing, or of another shape")
        return found

    def _broken(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"{self._folder}: not the layers of a calibration: {what}",
            "remove the folder, and calibrate again",
        )

    def keep(self, index: int, layer: Mapping[str, QuantizedTensor]) -> None:
        """Write the matrices of a layer. Raises EnvironmentFault."""
        arrays = {
            f"{name}|{part}": array
            for name, one in layer.items()
            for part, array in (
                ("values", one.values),
                ("scales", one.scales),
                ("minimums", one.minimums),
            )
            if array is not None
        }
        with atomic_write(self._file(index)) as file:
            np.savez(file, **arrays)

    def remove(self) -> None:
        """Of a calibration that has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, index: int) -> Path:
        return self._folder / f"layer_{index:04}.npz"


def layers_on(
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    texts: NDArray[np.int32],
    *,
    whole: bool,
    done: int = 0,
) -> Iterator[tuple[_Layer, list[Parameter]]]:
    """Each layer of a model and its parameters, once its matrices have seen their inputs; what the
    next layer sees is computed with those that have replaced them. `whole`: their gram matrices,
    else the diagonals, and nothing is replaced. The first `done` layers need to see nothing."""
    table = parameters(model)
    states: list[Floats | None] = [None] * len(texts)
    for index, block in enumerate(model.blocks):
        ours = [one for one in table if one.layer == index]
        layer = _Layer(model, block, {one: tensors[one.name] for one in ours}, tensors, whole)
        seen: list[Floats | None] = []
        if index >= done:
            seen = [layer.run(text, state) for text, state in zip(texts, states, strict=True)]
        yield layer, ours
        if whole:
            seen = [layer.run(text, state) for text, state in zip(texts, states, strict=True)]
        states = seen


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
        whole: bool = False,
    ) -> None:
        self._operands = {_key(one): _operand(one, tensor, whole) for one, tensor in own.items()}
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
        """The outputs of the layer; of the first layer (None) they are `tokens`."""
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


def _operand(one: Parameter, tensor: LazyTensor, whole: bool) -> Any:
    values = tensor.float32()
    if not one.is_linear:
        return values
    return _Matrix(np.ascontiguousarray(values.T) if one.transposed else values, whole)


class _Operand:
    """What stands for an array [out, in] in `reference.forward`: products with it are its own."""

    __array_ufunc__ = None  # so that `array @ operand` is left to it

    def astype(self, dtype: object) -> _Operand:
        return self

    @property
    def T(self) -> _Operand:
        return self


class _Matrix(_Operand):
    """A matrix [out, in] that adds up the gram matrix of its inputs, `whole` or its diagonal."""

    def __init__(self, values: Floats, whole: bool) -> None:
        self.values, self._whole = values, whole
        self.gram = np.zeros((values.shape[1],) * (2 if whole else 1))
        self._adds = True

    def replace(self, values: Floats) -> None:
        """Compute with other values from now on, and add nothing up."""
        self.values, self._adds = values, False
        self.gram = np.empty((0, 0))

    def __rmatmul__(self, x: NDArray[Any]) -> Floats:
        inputs = x.astype(np.float32)
        if self._adds and self._whole:
            self.gram += inputs.T @ inputs
        elif self._adds:
            self.gram += np.square(inputs).sum(0)
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
