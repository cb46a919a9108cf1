"""A text through a model, a layer at a time, and the inputs of each matrix.

Of the inputs x of a matrix that is their gram matrix (the sum of x x^T), or its diagonal alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.reference import forward
from lite_runner.architectures.spec import Block, Decoder
from lite_runner.weights import LazyTensor

Floats = NDArray[np.float32]
# a [m, k] @ b [k, n], of strided arrays: np.matmul, or the native kernels'
Product: TypeAlias = Callable[[Floats, Floats], Floats]
ROWS = 1024  # of inputs per product of a gram matrix: few enough for sums in float32


def layers_on(
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    texts: NDArray[np.int32],
    *,
    whole: bool,
    done: int = 0,
    product: Product = np.matmul,
) -> Iterator[tuple[Layer, list[Parameter]]]:
    """Each layer of a model and its parameters, once its matrices have seen their inputs; what the
    next layer sees is computed with those that have replaced them. `whole`: their gram matrices,
    else the diagonals, and nothing is replaced. The first `done` layers need to see nothing."""
    table = parameters(model)
    states: list[Floats | None] = [None] * len(texts)
    for index, block in enumerate(model.blocks):
        ours = [one for one in table if one.layer == index]
        own = {one: tensors[one.name] for one in ours}
        layer = Layer(model, block, own, tensors, whole, product)
        seen: list[Floats | None] = []
        if index >= done:
            layer.watch.on = True
            seen = [layer.run(text, state) for text, state in zip(texts, states, strict=True)]
            layer.watch.end()
        yield layer, ours
        if whole:
            seen = [layer.run(text, state) for text, state in zip(texts, states, strict=True)]
        states = seen
        layer.clear()  # now: the caller may still hold this layer when the next is read


class Layer:
    """A layer of a model as a model of its own, for `reference.forward`."""

    def __init__(
        self,
        model: Decoder,
        block: Block,
        own: Mapping[Parameter, LazyTensor],
        tensors: Mapping[str, LazyTensor],
        whole: bool = False,
        product: Product = np.matmul,
    ) -> None:
        self.watch = Watch(whole, product)
        self._operands = {_key(one): self._operand(one, tensor) for one, tensor in own.items()}
        alone = replace(
            model,
            blocks=(block,),
            norm=None,
            tie_word_embeddings=True,
            head_bias=False,
            logits_scaling=1.0,
            logits_softcap=None,
        )
        later = replace(alone, embedding_scale=1.0, learned_positions=False, embedding_norm=None)
        self._first, self._later = alone, later
        self._tensors = tensors
        self._before: dict[str, Floats] = {}  # activations before the first layer

    def _operand(self, one: Parameter, tensor: LazyTensor) -> Any:
        values = tensor.float32()
        if not one.is_linear:
            return values
        values = np.ascontiguousarray(values.T) if one.transposed else values
        return WatchedMatrix(values, self.watch)

    def clear(self) -> None:
        """Free the floats and their inputs."""
        self._operands.clear()
        self._before.clear()

    def matrix(self, parameter: Parameter) -> WatchedMatrix:
        found = self._operands[_key(parameter)]
        assert isinstance(found, WatchedMatrix)
        return found

    def values(self, parameter: Parameter) -> Floats:
        """The current values; matrices are [out, in]."""
        found = self._operands[_key(parameter)]
        values: Floats = found.values if isinstance(found, WatchedMatrix) else found
        return values

    def set(self, parameter: Parameter, values: Floats) -> None:
        """Replace the values; the inputs collected so far stay."""
        key = _key(parameter)
        if isinstance(self._operands[key], WatchedMatrix):
            self._operands[key].values = values
        else:
            self._operands[key] = values

    def run(self, tokens: NDArray[np.int32], state: Floats | None) -> Floats:
        """The outputs of the layer; of the first layer (None) they are `tokens`."""
        model = self._first if state is None else self._later
        table = parameters(model)
        ends = _State(self._read(table[0].name) if state is None else state, state)
        operands: dict[str, Any] = {}
        for one in table:
            if one.layer is not None:
                operands[one.name] = self._operands[_key(one)]
            elif one.role == "embedding":
                operands[one.name] = ends
            else:  # before the first layer
                operands[one.name] = self._read(one.name)
        forward(model, operands, tokens)
        return ends.result

    def _read(self, name: str) -> Floats:
        if name not in self._before:
            self._before[name] = self._tensors[name].float32()
        return self._before[name]


def _key(one: Parameter) -> tuple[Any, ...]:
    return one.role, one.kind, one.expert


class Watch:
    """Collects the inputs of a layer's matrices, while it is on."""

    def __init__(self, whole: bool, product: Product) -> None:
        self.on, self.product, self._whole = False, product, whole
        self._latest: Inputs | None = None

    def end(self) -> None:
        """Stop collecting, and hand the inputs to the matrices."""
        self.on, self._latest = False, None

    def inputs(self, x: NDArray[Any]) -> Inputs:
        """Inputs of a matrix, of which x are the first: of all matrices that multiply the same
        array they are one."""
        if self._latest is None or self._latest.latest is not x:
            self._latest = Inputs(x.shape[1], self._whole, self.product)
        return self._latest


class Inputs:
    """The inputs of matrices that multiply the same rows."""

    def __init__(self, columns: int, whole: bool, product: Product) -> None:
        """`whole`: their gram matrix is added up, else its diagonal."""
        self.latest: NDArray[Any] | None = None
        self.largest = np.zeros(columns, np.float32)  # only with a whole gram matrix
        self._product, self._waiting, self._rows = product, list[Floats](), 0
        self._sum = np.zeros((columns,) * (2 if whole else 1))

    def add(self, x: NDArray[Any], rows: Floats) -> None:
        """Add rows x in float32, once for all matrices that multiply them."""
        if x is self.latest:
            return
        self.latest = x
        if self._sum.ndim == 1:
            self._sum += np.square(rows).sum(0)
            return
        np.maximum(self.largest, np.abs(rows).max(0), out=self.largest)
        self._waiting.append(rows)
        self._rows += len(rows)
        if self._rows >= ROWS:
            self._add_up()

    def _add_up(self) -> None:
        rows = np.concatenate(self._waiting)
        self._waiting, self._rows = [], 0
        self._sum += self._product(rows.T, rows)

    @property
    def gram(self) -> NDArray[np.float64]:
        """[in, in], or of the diagonal [in]."""
        if self._waiting:
            self._add_up()
        return self._sum

    def divide(self, scales: Floats) -> None:
        """The gram matrix once the channels are divided by `scales`."""
        # By rows: the gram matrix of wide inputs is as large as the rest of a layer.
        for row, scale in zip(self.gram, scales, strict=True):
            row /= scale * scales
        self.largest /= scales


class _Operand:
    """A stand-in for an array [out, in] in `reference.forward`, which computes its products
    itself."""

    __array_ufunc__ = None  # so that `array @ operand` is left to it

    def astype(self, dtype: object) -> _Operand:
        return self

    @property
    def T(self) -> _Operand:
        return self


class WatchedMatrix(_Operand):
    """A matrix [out, in] of a layer, whose inputs are collected."""

    def __init__(self, values: Floats, watch: Watch) -> None:
        self.values, self._watch = values, watch
        self.inputs: Inputs | None = None  # stays None for an expert without tokens

    def replace(self, values: Floats) -> None:
        self.values, self.inputs = values, None

    def __rmatmul__(self, x: NDArray[Any]) -> Floats:
        rows = x.astype(np.float32)
        if not len(rows):
            return np.empty((0, len(self.values)), np.float32)
        if self._watch.on:
            self.inputs = self.inputs or self._watch.inputs(x)
            self.inputs.add(x, rows)
        return self._watch.product(rows, self.values.T)


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
