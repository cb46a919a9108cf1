"""One rank's shards of the tensors of a full checkpoint, sliced when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.config.ranks import Ranks
from lite_runner.weights.sharding.partition import Cut, cuts
from lite_runner.weights.tensor import Index, LazyTensor


def pieces(
    whole: Mapping[str, LazyTensor], model: Decoder, ranks: Ranks, *, vocab_parallel: bool
) -> dict[str, LazyTensor]:
    """The shards that `ranks` holds of all tensors of `model`."""
    how = cuts(model, ranks.tensor, vocab_parallel=vocab_parallel)
    return {name: _piece(tensor, how[name], ranks) for name, tensor in whole.items()}


def _piece(tensor: LazyTensor, cut: Cut, ranks: Ranks) -> LazyTensor:
    if cut.axis is None or cut.parts == 1:
        return tensor
    return sliced(tensor, cut.bounds(tensor.shape, ranks))


def sliced(tensor: LazyTensor, bounds: Index) -> LazyTensor:
    """A slice of a tensor, as a tensor; its slices are as cheap to read as the tensor's own."""
    ranges = [bound.indices(size)[:2] for bound, size in zip(bounds, tensor.shape, strict=True)]

    def piece(index: Index) -> NDArray[Any]:
        within = []
        for axis, (start, stop) in enumerate(ranges):
            low, high, _ = (index[axis] if axis < len(index) else slice(None)).indices(stop - start)
            within.append(slice(start + low, start + high))
        return tensor.piece(tuple(within))

    shape = tuple(stop - start for start, stop in ranges)
    part = None if tensor.part is None else piece
    return LazyTensor(shape, tensor.dtype, lambda: piece(()), part)
