"""Calibrated quantization, a layer at a time: GPTQ to 4 bits, or the nearest integers with scaled
channels (see channel_scales). What is to have 8 bits is only rounded.

Of the inputs x that a text gives a matrix, the gram matrix (sum of x x^T) says what an error of a
weight costs. Columns are rounded one after the other, those with the largest inputs first, and the
error of each is made up for by those that are left; then each integer moves to what is best beside
all others. The inputs are those that come out of the layers before, quantized.

E. Frantar et al., GPTQ: Accurate Post-Training Quantization, arXiv:2210.17323. Computed as LDLQ,
which is the same with one factorization: J. Chee et al., arXiv:2307.13304, theorem 6.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import Quantization, Scheme, schemes
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import atomic_write, read_json
from lite_runner.weights import LazyIntegers, LazyTensor
from lite_runner.weights.quantization.calibration import (
    ROWS,
    Floats,
    Inputs,
    Product,
    WatchedMatrix,
    layers_on,
)
from lite_runner.weights.quantization.channel_scales import Scaling, scale_channels
from lite_runner.weights.quantization.quantize import TOGETHER, dequantized
from lite_runner.weights.quantization.quantized import (
    QuantizedTensor,
    packed,
    quantize,
    quantize_to_4_bits,
)

T = TypeVar("T")
Method = Literal["gptq", Scaling]
NAMES = "names"  # metadata of the arrays of a kept layer
DAMPING = 0.01  # share of the mean of the gram's diagonal that is added to it
SCALE_BYTES = 2  # of a group's scale in compressed-tensors
BLOCK = 32  # columns whose errors are propagated together
PASSES = 2  # passes of coordinate descent over the integers


@dataclass(frozen=True, eq=False)
class Feedback:
    """The feedback of GPTQ: the error of a rounded column is made up for by those that are
    rounded later."""

    gram: Floats  # [in, in], damped
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
        return cls(damped.astype(np.float32), order, upper.astype(np.float32))


def gptq(
    weight: Floats, feedback: Feedback, nearest: QuantizedTensor, product: Product = np.matmul
) -> QuantizedTensor:
    """The matrix [out, in] in 4 bits: by feedback, and then by coordinate descent.

    Scales and minimums are those of the `nearest` integers: whatever the order of the
    columns, the groups stay as they lie.
    """
    order, shares, gram = feedback.order, feedback.shares, feedback.gram
    # All by columns, which lie together so.
    exact = np.ascontiguousarray(weight.T)
    left = exact[order]
    scales = np.ascontiguousarray(nearest.scales.astype(np.float32).T)
    minimums = np.ascontiguousarray(nearest.smallest.T)
    inverses = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 1e-38)
    codes, errors = np.empty(exact.shape, np.uint8), np.empty_like(exact)

    def round_column(at: int, wanted: Floats) -> Floats:
        """The error of a column with the integers that are nearest to the `wanted` values."""
        place = at // nearest.group
        codes[at] = np.clip(np.rint((wanted - minimums[place]) * inverses[place]), 0, 15)
        error: Floats = exact[at] - (scales[place] * codes[at] + minimums[place])
        return error

    for columns in _blocks(len(order)):
        if columns.start:
            left[columns] += product(shares[: columns.start, columns].T, errors[: columns.start])
        for at in range(columns.start, columns.stop):
            errors[at] = round_column(order[at], left[at])
            later = slice(at + 1, columns.stop)
            left[later] += shares[at, later, None] * errors[at]
    errors[order] = errors.copy()
    for columns in _blocks(len(order)) * PASSES:
        pulls = product(gram[columns], errors)
        for at, pull in enumerate(pulls, columns.start):
            before = errors[at].copy()
            errors[at] = round_column(at, exact[at] - before + pull / gram[at, at])
            later = slice(at + 1, columns.stop)
            pulls[at + 1 - columns.start :] += gram[later, at, None] * (errors[at] - before)
    return replace(nearest, values=packed(np.ascontiguousarray(codes.T)))


def _blocks(count: int) -> list[slice]:
    return [slice(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]


def calibrated(
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    quantization: Quantization,
    texts: NDArray[np.int32],
    *,
    method: Method = "gptq",
    around_zero: bool,
    kept: KeptLayers | None = None,
    product: Product = np.matmul,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, LazyTensor]:
    """The tensors of a model with its linear layers as of `gptq`, or the nearest integers to those
    with scaled channels, for the inputs that the token ids of `texts` [n, T] give them; all else is
    as it was, and so are integers of the same form.

    `around_zero`: in the form of `quantize_around_zero`. Layers that are `kept` are not computed
    again. A layer at a time is in memory as floats, beside its inputs and what is quantized.
    `advance` is called for each layer. Raises ArtifactError and EnvironmentFault.
    """

    @lru_cache(maxsize=1)  # by matrices that multiply the same inputs
    def feedback(inputs: Inputs) -> Feedback:
        return Feedback.of(inputs.gram)

    def nearest(values: Floats, name: str, squares: NDArray[np.float64] | None) -> QuantizedTensor:
        """`squares`: the sums of those of the matrix's inputs, if it has seen any."""
        scheme = wanted[name]
        if scheme.bits == 8:
            return quantize(values, 8, scheme.group, name)
        return quantize_to_4_bits(values, scheme.group, name, squares, around_zero=around_zero)

    def rounded(matrix: WatchedMatrix, name: str) -> QuantizedTensor:
        inputs = matrix.inputs
        found = nearest(matrix.values, name, None if inputs is None else np.diagonal(inputs.gram))
        if method != "gptq" or inputs is None or found.bits == 8:
            return found
        return gptq(matrix.values, feedback(inputs), found, product)

    wanted = schemes(model, quantization)
    fixed = set()  # linear layers that stay unchanged: floats, or exact integers
    for one in parameters(model):
        held, scheme = tensors[one.name].integers, wanted.get(one.name)
        if one.is_linear and (
            scheme is None or (held and held.scheme == scheme and not around_zero)
        ):
            fixed.add(one.name)
    found = dict(tensors)
    done = kept.count if kept else 0
    layers = layers_on(tensors, model, texts, whole=True, done=done, product=product)
    for index, (layer, ours) in enumerate(layers):
        quantized: dict[str, QuantizedTensor] = {}
        floats: dict[str, Floats] = {}
        if kept and index < done:
            quantized, floats = kept.layer(index)
        elif method != "gptq":
            changed = scale_channels(layer, model, index, method, nearest, product, fixed)
            floats = {one.name: layer.values(one) for one in changed if not one.is_linear}
        linear = [one for one in ours if one.is_linear and one.name not in fixed]
        places: dict[int, int] = {}  # by inputs, so that matrices with the same ones are adjacent
        linear.sort(key=lambda one: places.setdefault(id(layer.matrix(one).inputs), len(places)))
        for one in linear:
            matrix, scheme = layer.matrix(one), wanted[one.name]
            if kept and index < done:
                exact = kept.checked(quantized, one.name, matrix.values.shape, scheme)
            else:
                exact = quantized[one.name] = rounded(matrix, one.name)
            if around_zero:
                scheme = replace(scheme, group_bytes=SCALE_BYTES)
            matrix.replace(exact.float32())
            integers = LazyIntegers(scheme, partial(_same, exact), True)
            read = partial(dequantized, integers, one.transposed)
            shape = tensors[one.name].shape
            found[one.name] = LazyTensor(shape, "F32", read, integers=integers)
        for one in (one for one in ours if one.name in floats):
            values, shape = floats[one.name], tensors[one.name].shape
            if kept and values.shape != shape:
                raise kept.broken(f"{one.name} is of another shape")
            layer.set(one, values)
            found[one.name] = LazyTensor(shape, "F32", partial(_same, values))
        if kept and index >= done:
            kept.keep(index, quantized, floats)
        feedback.cache_clear()  # as large as the matrices, and not needed by the next layer
        advance(1)
    return found


def working_bytes(model: Decoder, tokens: int, *, feedback: bool) -> int:
    """About what `calibrated` takes with a text of so many tokens, beside the embedding or what is
    quantized: the largest layer's floats and gram matrices, and work on the widest. `feedback`: of
    method gptq."""
    held, seen = Counter[int | None](), set[tuple[object, ...]]()
    widest = largest = 0
    for one in parameters(model):
        size = math.prod(one.shape)
        held[one.layer] += 4 * size
        if one.layer is None or not one.is_linear:
            continue
        largest = max(largest, size)
        inputs = one.layer, one.expert, TOGETHER.get(one.role, one.role)
        if inputs not in seen:
            seen.add(inputs)
            columns = one.shape[0] if one.transposed else one.shape[1]
            held[one.layer] += 4 * columns * (2 * columns + min(ROWS, tokens))
            widest = max(widest, columns)
    # `Feedback.of`: the damped gram, two in order and the factor. Others: it once more, as float32.
    most, least = (32, 8) if feedback else (4, 4)
    work = max(most * widest**2, least * widest**2 + 20 * largest)
    states = 2 * 4 * tokens * model.hidden_size
    return max(size for layer, size in held.items() if layer is not None) + work + states


class KeptLayers:
    """The quantized layers of a calibration that has not ended, in a folder, so that the next run
    goes on behind them."""

    def __init__(self, folder: Path, settings: str) -> None:
        """`settings`: of the run; a folder of others is emptied.

        Raises ConfigError for a folder with other files, EnvironmentFault where nothing can be
        written.
        """
        self._folder = folder
        file, ours = folder / "settings", settings.encode()
        if not file.is_file() and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder}: a calibration keeps its layers there, and it holds other files",
                "move it away, or choose another quantize_output=",
            )
        if not file.is_file() or file.read_bytes() != ours:
            self.remove()
            with atomic_write(file) as written:
                written.write(ours)

    @property
    def count(self) -> int:
        """The number of kept layers, from the first on."""
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
            raise self.broken(f"{file.name} is not a list of names")
        return tuple(names)

    def layer(self, index: int) -> tuple[dict[str, QuantizedTensor], dict[str, Floats]]:
        """The matrices of a layer by name, and the changed floats. Raises ArtifactError."""
        found: dict[str, QuantizedTensor] = {}
        floats: dict[str, Floats] = {}
        try:
            with np.load(self._file(index), allow_pickle=False) as held:
                written = held[NAMES].tolist()
                if set(held.files) != {*written, NAMES}:
                    raise ValueError(f"layer {index} does not have the arrays that were written")
                for key in written:
                    name, _, part = key.rpartition("|")
                    if part == "floats":
                        floats[name] = held[key]
                        if floats[name].dtype != np.float32:
                            raise ValueError(f"{name} is {floats[name].dtype}")
                    if part == "values":
                        low = held.get(f"{name}|minimums")
                        values, scales = held[key], held[f"{name}|scales"]
                        bits = 8 if values.dtype == np.int8 else 4
                        groups = scales.shape[1] if scales.ndim > 1 else 0  # 0: by row
                        group = 8 // bits * values.shape[1] // groups if groups else 0
                        zero = 8 if low is None and bits == 4 else 0
                        found[name] = QuantizedTensor(bits, group, values, scales, low, zero)
        except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise self.broken(str(error)) from error
        return found, floats

    def checked(
        self,
        layer: Mapping[str, QuantizedTensor],
        name: str,
        shape: tuple[int, ...],
        scheme: Scheme,
    ) -> QuantizedTensor:
        """The matrix of this name. Raises ArtifactError."""
        found = layer.get(name)
        if found is None:
            raise self.broken(f"{name} is missing")
        rows, columns = shape
        groups = (rows, columns // scheme.group) if scheme.group else (rows,)
        width = columns * scheme.bits // 8
        values = (rows, width), np.dtype(np.int8 if scheme.bits == 8 else np.uint8)
        scales = groups, np.dtype(np.float16 if scheme.group else np.float32)
        held = ((found.values, values), (found.scales, scales), (found.minimums, scales))
        same = all(one is None or (one.shape, one.dtype) == form for one, form in held)
        if not same or not found.sound:
            raise self.broken(f"{name} is damaged, or of another shape")
        return found

    def broken(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"{self._folder}: not the layers of a calibration: {what}",
            "remove the folder, and calibrate again",
        )

    def keep(
        self, index: int, layer: Mapping[str, QuantizedTensor], floats: Mapping[str, Floats]
    ) -> None:
        """Write the matrices of a layer, and its floats that have changed. Raises
        EnvironmentFault."""
        arrays: dict[str, NDArray[Any]] = {f"{name}|floats": one for name, one in floats.items()}
        arrays |= {
            f"{name}|{part}": array
            for name, one in layer.items()
            for part, array in (
                ("values", one.values),
                ("scales", one.scales),
                ("minimums", one.minimums),
            )
            if array is not None
        }
        arrays[NAMES] = np.array(list(arrays), np.str_)
        with atomic_write(self._file(index)) as file:
            np.savez(file, **arrays)

    def remove(self) -> None:
        """Remove the files of a finished calibration."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _file(self, index: int) -> Path:
        return self._folder / f"layer_{index:04}.npz"


def _same(held: T) -> T:
    return held
