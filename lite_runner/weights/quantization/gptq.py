"""Calibrated quantization to 4 bits: GPTQ, a layer at a time. What is to have 8 is only rounded.

Of the inputs x that a text gives a matrix, the gram matrix (sum of x x^T) says what an error of a
weight costs. Columns are rounded one after the other, those with the largest inputs first, and the
error of each is made up for by those that are left. The inputs are those that come out of the
layers before, quantized.

E. Frantar et al., GPTQ: Accurate Post-Training Quantization, arXiv:2210.17323. Computed as LDLQ,
which is the same with one factorization: J. Chee et al., arXiv:2307.13304, theorem 6.
"""

from __future__ import annotations

import itertools
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.quantization import Quantization, Scheme, schemes
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.files import atomic_write, make_folder, read_json
from lite_runner.weights import LazyIntegers, LazyTensor
from lite_runner.weights.quantization.calibration import (
    Floats,
    Inputs,
    Product,
    WatchedMatrix,
    layers_on,
)
from lite_runner.weights.quantization.quantize import dequantized
from lite_runner.weights.quantization.quantized import (
    QuantizedTensor,
    packed,
    quantize,
    quantize_to_4_bits,
)

DAMPING = 0.01  # of the mean of the gram's diagonal, added to it
SCALE_BYTES = 2  # of a group in the form of compressed-tensors
BLOCK = 32  # columns whose errors reach the rest together


@dataclass(frozen=True, eq=False)
class Feedback:
    """The feedback of GPTQ: the error of a rounded column is made up for by those that are
    rounded later."""

    order: NDArray[np.intp]  # of the columns
    shares: Floats  # [in, in], strictly upper: of the error of a row's column, in a later column

    @classmethod
    def of(cls, gram: NDArray[np.float64]) -> Feedback:
        """For inputs with this gram matrix [in, in]: R - 1, where it is R D R^T with R upper and
        unit triangular, columns in order and damped."""
        diagonal = np.diagonal(gram)
        order = np.argsort(-diagonal, kind="stable")
        damped = gram + np.diag((diagonal == 0) + DAMPING * diagonal.mean())
        backwards = order[::-1]
        upper = np.linalg.cholesky(damped[backwards][:, backwards])[::-1, ::-1]
        upper = upper / np.diagonal(upper)
        np.fill_diagonal(upper, 0)
        return cls(order, upper.astype(np.float32))


def gptq(
    weight: Floats, feedback: Feedback, nearest: QuantizedTensor, product: Product = np.matmul
) -> QuantizedTensor:
    """The matrix [out, in] in 4 bits.

    Scales and minimums are those of the `nearest` integers: whatever the order of the
    columns, the groups stay as they lie.
    """
    order, shares = feedback.order, feedback.shares
    # All by columns, which lie together so.
    exact = np.ascontiguousarray(weight.T[order])
    left = exact.copy()
    scales = np.ascontiguousarray(nearest.scales.astype(np.float32).T)
    minimums = np.ascontiguousarray(nearest.smallest.T)
    inverses = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 1e-38)
    codes = np.empty(exact.shape, np.uint8)
    errors = np.empty_like(exact)
    for begin in range(0, len(order), BLOCK):
        end = min(begin + BLOCK, len(order))
        if begin:
            left[begin:end] += product(shares[:begin, begin:end].T, errors[:begin])
        for at in range(begin, end):
            place = order[at] // nearest.group
            q = np.clip(np.rint((left[at] - minimums[place]) * inverses[place]), 0, 15)
            codes[order[at]] = q
            errors[at] = exact[at] - (scales[place] * q + minimums[place])
            left[at + 1 : end] += shares[at, at + 1 : end, None] * errors[at]
    return replace(nearest, values=packed(np.ascontiguousarray(codes.T)))


def calibrated(
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    quantization: Quantization,
    texts: NDArray[np.int32],
    *,
    around_zero: bool,
    kept: KeptLayers | None = None,
    product: Product = np.matmul,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, LazyTensor]:
    """The tensors of a model with its linear layers as of `gptq`, for the inputs that the token ids
    of `texts` [n, T] give them; all else is as it was, and so are integers of the same form.

    `around_zero`: in the form of `quantize_around_zero`. Layers that are `kept` are not computed
    again. A layer at a time is in memory as floats, beside its inputs and what is quantized.
    `advance` is told of each layer. Raises ArtifactError and EnvironmentFault.
    """

    @lru_cache(maxsize=1)  # of matrices that multiply the same inputs
    def feedback(inputs: Inputs) -> Feedback:
        return Feedback.of(inputs.gram)

    def rounded(matrix: WatchedMatrix, scheme: Scheme, name: str) -> QuantizedTensor:
        group, sizes = scheme.group, None
        if scheme.bits == 8:
            return quantize(matrix.values, 8, group, name)
        if matrix.inputs is not None:
            sizes = np.diagonal(matrix.inputs.gram)
        nearest = quantize_to_4_bits(matrix.values, group, name, sizes, around_zero=around_zero)
        if matrix.inputs is None:
            return nearest
        return gptq(matrix.values, feedback(matrix.inputs), nearest, product)

    wanted = schemes(model, quantization)
    found = dict(tensors)
    done = kept.count if kept else 0
    layers = layers_on(tensors, model, texts, whole=True, done=done, product=product)
    for index, (layer, ours) in enumerate(layers):
        before = kept.layer(index) if kept and index < done else {}
        quantized: dict[str, QuantizedTensor] = {}
        linear = [one for one in ours if one.name in wanted and one.is_linear]
        places: dict[int, int] = {}  # of inputs: what multiplies the same follows each other
        linear.sort(key=lambda one: places.setdefault(id(layer.matrix(one).inputs), len(places)))
        for one in linear:
            held, scheme = tensors[one.name].integers, wanted[one.name]
            if held is not None and held.scheme == scheme and not around_zero:
                continue  # as they are, they have no error
            matrix = layer.matrix(one)
            if kept and index < done:
                exact = kept.checked(before, one.name, matrix.values.shape)
            else:
                exact = rounded(matrix, scheme, one.name)
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
        feedback.cache_clear()  # as large as the matrices, and of no use to the next layer
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

    def chosen(self, measure: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """The names of what has 8 bits, as of the run that was ended, or as they are measured.
        Raises ArtifactError."""
        file = self._folder / "finer.json"
        if not file.is_file():
            with atomic_write(file) as written:
                written.write(json.dumps(measure()).encode())
        names = read_json(file)
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise self._broken(f"{file.name} is no list of names")
        return tuple(names)

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
                        bits = 8 if values.dtype == np.int8 else 4
                        group = 8 // bits * values.shape[1] // scales.shape[1]
                        zero = 8 if low is None and bits == 4 else 0
                        found[name] = QuantizedTensor(bits, group, values, scales, low, zero)
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
        """Remove the files of a calibration that has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, index: int) -> Path:
        return self._folder / f"layer_{index:04}.npz"


def _same(matrix: QuantizedTensor) -> QuantizedTensor:
    return matrix
