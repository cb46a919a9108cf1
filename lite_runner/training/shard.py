"""Tensor parallel training: a rank's part of a model's layers, and what the ranks add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.parallel import Ranks
from lite_runner.training.kernels import Array
from lite_runner.training.tape import Slot, Tape, Value
from lite_runner.weights import Index
from lite_runner.weights.sharding.partition import strategy_of

AllGather: TypeAlias = Callable[[Array], Array]  # [n] of each rank of the model: [ranks, n]


class ModelShard:
    """The heads and columns of one rank; embedding, head and norms are whole on each.

    What every rank has whole has the same bits on all of them: sums are added in their order.
    """

    def __init__(self, model: Decoder, ranks: Ranks, all_gather: AllGather) -> None:
        """All ranks of the model must call the collective for the same operations in turn."""
        self._gather = all_gather
        self.first = ranks.tensor_index == 0
        width = model.num_heads // ranks.tensor
        self.heads = slice(ranks.tensor_index * width, (ranks.tensor_index + 1) * width)
        layouts = strategy_of(model, ranks, vocab_parallel=False).layouts
        self._bounds: dict[str, Index] = {}
        self._turned = {one.name for one in parameters(model) if one.transposed}
        for one in parameters(model):
            self._bounds[one.name] = layouts[one.name].bounds(one.shape, ranks.rank)

    def bounds(self, name: str) -> Index:
        """The part of a tensor as it is held."""
        return self._bounds[name]

    def sides(self, name: str) -> tuple[slice, slice]:
        """The part of a matrix [out, in]."""
        first, second = self._bounds[name]
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
        """x as each rank's columns take it: its gradient is the sum of theirs."""
        to_x = x.slot

        def backward(grad: Array) -> None:
            assert to_x is not None
            to_x.add(self.added(grad))

        return tape.record(x.array, [x], backward)

    def summed(self, tape: Tape, x: Value) -> Value:
        """The sum of what the ranks' rows give."""
        to_x = x.slot

        def backward(grad: Array) -> None:
            assert to_x is not None
            to_x.add(grad, own=False)

        return tape.record(self.added(x.array), [x], backward)


class PartOf(Slot):
    """The place of the gradient of a part of an array, whose rest has none here."""

    def __init__(self, slot: Slot, shape: tuple[int, ...], place: Index) -> None:
        super().__init__()
        self._slot, self._shape, self._place = slot, shape, place

    def add(self, grad: Array, own: bool = True) -> None:
        whole = np.zeros(self._shape, np.float32)
        whole[self._place] = grad
        self._slot.add(whole)
