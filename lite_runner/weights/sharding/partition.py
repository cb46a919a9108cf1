"""Tensor parallelism: the cut of each of a model's tensors, and one rank's slices.

A column-parallel layer (q, k, v, gate, up) is split along its outputs, the following row-parallel
one (the output projection, down) along its inputs; everything after an all-reduce is replicated.
The embedding and the head are vocabulary-parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from numpy.typing import NDArray

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.parallel import Ranks
from lite_runner.records import dataclass
from lite_runner.weights.formats.gguf_blocks import BlockMatrix, block_columns
from lite_runner.weights.quantization.quantized import QuantizedTensor
from lite_runner.weights.tensor import Index, LazyTensor


@dataclass(frozen=True)
class Cut:
    """Equal shards of a tensor along an axis; `axis` None: replicated.

    With fewer key/value heads than ranks there are fewer `parts` than ranks, and neighbouring ranks
    have the same shard.
    """

    axis: int | None = None
    parts: int = 1

    def piece(self, ranks: Ranks) -> int:
        """Index of a rank's shard."""
        return ranks.tensor_index * self.parts // ranks.tensor

    def bounds(self, shape: tuple[int, ...], ranks: Ranks) -> tuple[slice, ...]:
        """The rank's shard of a full tensor of `shape`, as an index."""
        if self.axis is None:
            return (slice(None),) * len(shape)
        step = shape[self.axis] // self.parts
        start = self.piece(ranks) * step
        whole = [slice(None)] * len(shape)
        whole[self.axis] = slice(start, start + step)
        return tuple(whole)


def cuts(model: Decoder, tensor: int, *, vocab_parallel: bool = True) -> dict[str, Cut]:
    """Name -> cut of every tensor of the model, for `tensor` tensor-parallel ranks."""
    return {one.name: _cut(one, model, tensor, vocab_parallel) for one in parameters(model)}


def _cut(parameter: Parameter, model: Decoder, tensor: int, vocab_parallel: bool) -> Cut:
    # The outputs of a linear layer are its first axis, or its last where it is held [in, out].
    last = len(parameter.shape) - 1
    outputs = last if parameter.transposed else 0
    if parameter.split == "vocabulary":
        return Cut(0, tensor) if vocab_parallel else Cut()
    if parameter.split == "outputs":
        return Cut(outputs, tensor)
    if parameter.split == "key_heads":
        return Cut(outputs, min(tensor, model.n_kv_heads))
    if parameter.split == "inputs":
        return Cut(last - outputs, tensor)
    return Cut()


Matrix = TypeVar("Matrix", QuantizedTensor, BlockMatrix)


def pieces(
    whole: Mapping[str, LazyTensor], model: Decoder, ranks: Ranks, *, vocab_parallel: bool
) -> dict[str, LazyTensor]:
    """The shards that `ranks` holds of all tensors of `model`, integers and GGUF's blocks too.

    Columns are cut between groups, or blocks. Where a shard ends within one, the integers or blocks
    of a `down` matrix include it, on both ranks; an attention's output has floats alone then.
    """
    how = cuts(model, ranks.tensor, vocab_parallel=vocab_parallel)
    table = {one.name: one for one in parameters(model)}
    return {name: _piece(one, table[name], how[name], ranks) for name, one in whole.items()}


def _piece(tensor: LazyTensor, parameter: Parameter, cut: Cut, ranks: Ranks) -> LazyTensor:
    if cut.axis is None or cut.parts == 1:
        return tensor
    bounds = cut.bounds(tensor.shape, ranks)
    integers, own = tensor.integers, tensor.own
    if integers is not None:
        part = _part(integers.read, parameter, bounds, integers.scheme.group)
        integers = None if part is None else replace(integers, read=part)
    if own is not None:
        blocks = _part(own.read, parameter, bounds, block_columns(own.type_name))
        nbytes = own.nbytes // cut.parts
        own = None if blocks is None else replace(own, read=blocks, nbytes=nbytes)
    return replace(sliced(tensor, bounds), integers=integers, own=own)


def _part(
    read: Callable[[], Matrix], parameter: Parameter, bounds: Index, unit: int
) -> Callable[[], Matrix] | None:
    """Reads the shard within `bounds` of a matrix whose columns are in groups of `unit` (0: none);
    None where they are cut within a group, and only whole ones can be read."""
    rows, columns = bounds[::-1] if parameter.layout == "in_out" else bounds
    if parameter.split != "inputs":
        return lambda: read().with_rows(lambda array: array[rows])
    start, stop = columns.start, columns.stop
    if unit:
        start, stop = start // unit * unit, -(-stop // unit) * unit
    if (
        slice(start, stop) != slice(columns.start, columns.stop)
        and parameter.role == "attention_out"
    ):
        return None
    return lambda: read().with_columns(start, stop)


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
