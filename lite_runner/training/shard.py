"""Tensor-parallel training: a rank's shard of a model's layers, and the sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from lite_runner.architectures import by_role, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.training.kernels import Array
from lite_runner.training.tape import Slot, Tape, Value
from lite_runner.weights import Index
from lite_runner.weights.sharding.partition import strategy_of

# Tensors whose gradients come from a rank's own heads.
_HEADS = ("query", "key", "value", "query_norm", "key_norm", "sinks")

AllGather: TypeAlias = Callable[[Array], Array]  # [n] of each rank of the model: [ranks, n]


class ModelShard:
    """The heads and columns of one rank; embedding, head and norms are whole on each.

    What every rank has whole has the same bits on all of them: sums are added in their order.
    """

    def __init__(self, model: Decoder, ranks: Ranks, all_gather: AllGather) -> None:
        """All ranks of the model must call the collective for the same operations in turn."""
        self._gather = all_gather
        width = model.num_heads // ranks.tensor
        self.heads = slice(ranks.tensor_index * width, (ranks.tensor_index + 1) * width)
        layouts = strategy_of(model, ranks, vocab_parallel=False).layouts
        self._ranks = range(ranks.tensor)
        self._own = ranks.tensor_index
        self._turned = {one.name for one in parameters(model) if one.transposed}
        self._shapes = {one.name: one.shape for one in parameters(model)}
        self._of_heads = {one.name for (role, *_), one in by_role(model).items() if role in _HEADS}
        self._bounds = {
            name: [layouts[name].bounds(shape, rank) for rank in self._ranks]
            for name, shape in self._shapes.items()
        }

    def bounds(self, name: str) -> Index:
        """The bounds of this rank's part of a stored tensor."""
        return self._bounds[name][self._own]

    def divides(self, name: str) -> bool:
        """True where each rank has a different part of a tensor."""
        first, *others = self._bounds[name]
        return any(one != first for one in others)

    def owns(self, name: str) -> bool:
        """True for the first of the ranks with the same part."""
        return self._bounds[name].index(self.bounds(name)) == self._own

    def sharing(self, name: str) -> list[int]:
        """The ranks of the model whose gradients of this part are added: of what heads share, those
        that have it; else this one, whose gradient is that of all."""
        if name not in self._of_heads:
            return [self._own]
        return [rank for rank in self._ranks if self._bounds[name][rank] == self.bounds(name)]

    def joined(self, name: str, parts: Sequence[Array]) -> Array:
        """A tensor assembled from its parts by rank."""
        whole = np.empty(self._shapes[name], np.float32)
        for bounds, part in zip(self._bounds[name], parts, strict=True):
            whole[bounds] = part
        return whole

    def sides(self, name: str) -> tuple[slice, slice]:
        """The bounds of this rank's part of a matrix [out, in]."""
        first, second = self.bounds(name)
        return (second, first) if name in self._turned else (first, second)

    def added(self, array: Array) -> Array:
        """The sum of the ranks' arrays."""
        rows = self._gather(np.ascontiguousarray(array).reshape(-1))
        total: Array = rows[0].copy()
        for other in rows[1:]:
            total += other
        found: Array = total.reshape(array.shape)
        return found

    def entered(self, tape: Tape, x: Value) -> Value:
        """x as the input of column-parallel matrices: its gradient is summed over the ranks."""
        to_x = x.slot

        def backward(grad: Array) -> None:
            assert to_x is not None
            to_x.add(self.added(grad))

        return tape.record(x.array, [x], backward)

    def summed(self, tape: Tape, x: Value) -> Value:
        """The sum of row-parallel outputs over the ranks."""
        to_x = x.slot

        def backward(grad: Array) -> None:
            assert to_x is not None
            to_x.add(grad, own=False)

        return tape.record(self.added(x.array), [x], backward)


class PartOf(Slot):
    """The gradient slot of a part of an array."""

    def __init__(self, slot: Slot, shape: tuple[int, ...], place: Index) -> None:
        super().__init__()
        self._slot, self._shape, self._place = slot, shape, place

    def add(self, grad: Array, own: bool = True) -> None:
        whole = np.zeros(self._shape, np.float32)
        whole[self._place] = grad
        self._slot.add(whole)
