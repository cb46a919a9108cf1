"""Tensor parallelism: the layout of each of a model's tensors over ranks, and one rank's slices.

A column-parallel layer (q, k, v, gate, up) is split along its outputs, the following row-parallel
one (the output projection, down) along its inputs; everything after an all-reduce is replicated.
The embedding and the head are vocabulary-parallel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from numpy.typing import NDArray

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.records import dataclass
from lite_runner.weights import Index, LazyTensor
from lite_runner.weights.formats.gguf_blocks import BlockMatrix, block_columns
from lite_runner.weights.quantization.quantized import QuantizedTensor


@dataclass(frozen=True)
class Layout:
    """The sharding of a tensor over the ranks of one pipeline stage.

    The ranks fill `dev_matrix`, the last axis first. `tensor_map` has an entry for each axis of the
    tensor: the axes of the matrix, counted from the right, that shard it; (): not sharded.
    """

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    stage: int = 0

    @property
    def devices(self) -> int:
        return math.prod(self.dev_matrix)

    @property
    def parts(self) -> tuple[int, ...]:
        """The number of shards along each axis of the tensor."""
        return tuple(
            math.prod(self.dev_matrix[-1 - axis] for axis in axes) for axes in self.tensor_map
        )

    def bounds(self, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
        """The shard of a full tensor of `shape` that a rank of the stage holds, as an index."""
        found = []
        for size, axes in zip(shape, self.tensor_map, strict=True):
            piece, parts = 0, 1
            for axis in axes:
                length = self.dev_matrix[-1 - axis]
                below = math.prod(self.dev_matrix[len(self.dev_matrix) - axis :])
                piece = piece * length + rank // below % length
                parts *= length
            found.append(slice(piece * size // parts, (piece + 1) * size // parts))
        return tuple(found)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """True if a tensor of `shape` can be sharded so, in equal shards."""
        return len(shape) == len(self.parts) and all(
            size % parts == 0 for size, parts in zip(shape, self.parts, strict=True)
        )


@dataclass(frozen=True)
class Strategy:
    """The layouts of all parameters, and how many ranks there are."""

    layouts: Mapping[str, Layout]
    stages: int = 1

    @property
    def devices(self) -> int:
        """Ranks of a stage."""
        return next(iter(self.layouts.values())).devices

    @property
    def ranks(self) -> int:
        return self.stages * self.devices


def strategy_of(model: Decoder, ranks: Ranks, *, vocab_parallel: bool = True) -> Strategy:
    """This project's layout of a model over `ranks`, whose own rank is ignored."""
    table = parameters(model)
    return Strategy({one.name: _layout(one, model, ranks, vocab_parallel) for one in table})


def _layout(parameter: Parameter, model: Decoder, ranks: Ranks, vocab_parallel: bool) -> Layout:
    # The outputs of a linear layer are its first axis, or its last where it is held [in, out].
    last, split = len(parameter.shape) - 1, parameter.split
    outputs = last if parameter.transposed else 0
    axis = {"vocabulary": 0, "inputs": last - outputs}.get(split, outputs)
    parts = min(ranks.tensor, model.n_kv_heads) if split == "key_heads" else ranks.tensor
    axes: list[tuple[int, ...]] = [()] * (last + 1)
    if split == "none" or (split == "vocabulary" and not vocab_parallel):
        return Layout((ranks.data, ranks.tensor), tuple(axes))
    if parts == ranks.tensor:
        axes[axis] = (0,)
        return Layout((ranks.data, parts), tuple(axes))
    axes[axis] = (1,)  # with fewer key/value heads than ranks, neighbours hold the same shard
    return Layout((ranks.data, parts, ranks.tensor // parts), tuple(axes))


Matrix = TypeVar("Matrix", QuantizedTensor, BlockMatrix)


def pieces(
    whole: Mapping[str, LazyTensor], model: Decoder, ranks: Ranks, *, vocab_parallel: bool
) -> dict[str, LazyTensor]:
    """The shards that `ranks` holds of all tensors of `model`, integers and GGUF's blocks too.

    Columns are cut between groups, or blocks. Where a shard ends within one, the integers or blocks
    of a `down` matrix include it, on both ranks; an attention's output has floats alone then.
    """
    layouts = strategy_of(model, ranks, vocab_parallel=vocab_parallel).layouts
    table = {one.name: one for one in parameters(model)}
    return {name: _piece(one, table[name], layouts[name], ranks) for name, one in whole.items()}


def _piece(tensor: LazyTensor, parameter: Parameter, layout: Layout, ranks: Ranks) -> LazyTensor:
    count = math.prod(layout.parts)
    if count == 1:
        return tensor
    bounds = layout.bounds(tensor.shape, ranks.rank)
    integers, blocks = tensor.integers, tensor.blocks
    if integers is not None:
        part = _part(integers.read, parameter, bounds, integers.scheme.group)
        if integers.ordered and parameter.split == "inputs":
            part = None
        integers = None if part is None else replace(integers, read=part)
    if blocks is not None:
        part_of_blocks = _part(blocks.read, parameter, bounds, block_columns(blocks.type_name))
        nbytes = blocks.nbytes // count
        blocks = part_of_blocks and replace(blocks, read=part_of_blocks, nbytes=nbytes)
    return replace(
        sliced(tensor, bounds), integers=integers, block_type=tensor.block_type, blocks=blocks
    )


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
