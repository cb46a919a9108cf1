"""What ranks that share a copy of a model do together: sums and joins over their parts.

Layers are cut by hand, with AllReduce (sum) and AllGather only: that is all that MindSpore has on
CPU, where its own sharding refuses to work. Which tensor is cut where says
`lite_runner.weights.sharding.partition`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mindspore as ms
from mindspore import Tensor, nn, ops

from lite_runner.config.ranks import Ranks

Combine = Callable[[Tensor], Tensor]  # makes one tensor of those of several ranks


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among those that share its copy of the model."""

    ranks: Ranks
    group: str  # of communication: the ranks of this copy
    gathers: bool  # whether AllGather works in the group; on CPU only in that of all ranks
    cut_vocabulary: bool  # False: the embedding and the head are whole on every rank

    def heads(self, local: int) -> slice:
        """Which of the model's heads this rank's `local` ones are."""
        return slice(self.ranks.tensor_index * local, (self.ranks.tensor_index + 1) * local)


class SharedEmbedding(nn.Cell):
    """Looks up rows of a table [vocab, hidden] of which this rank holds an equal part."""

    def __init__(self, parallel: TensorParallel, rows: int) -> None:
        """`rows`: of this rank's part."""
        super().__init__()
        self.start, self.rows = parallel.ranks.tensor_index * rows, rows
        self.gather = ops.Gather()
        self.sum = ops.AllReduce(group=parallel.group)

    def construct(self, table: Tensor, indices: Tensor) -> Tensor:
        """Indices [n] into the whole table -> [n, hidden] float32: one rank's row and zeros."""
        place = indices - self.start
        inside = ops.logical_and(place >= 0, place < self.rows)
        place = ops.minimum(ops.maximum(place, 0), self.rows - 1)
        found = self.gather(table, place, 0).astype(ms.float32)
        return self.sum(found * inside.astype(ms.float32).reshape(-1, 1))


class JoinedLogits(nn.Cell):
    """Parts of logits [n, vocab / ranks] -> [n, vocab], the same bits on every rank."""

    def __init__(self, parallel: TensorParallel, part: int) -> None:
        """`part`: the length of this rank's."""
        super().__init__()
        self.count, self.part = parallel.ranks.tensor, part
        self.gather = ops.AllGather(group=parallel.group) if parallel.gathers else None
        before = parallel.ranks.tensor_index * part
        behind = self.count * part - part - before
        self.pad = ops.Pad(((0, 0), (before, behind)))
        self.sum = ops.AllReduce(group=parallel.group)

    def construct(self, x: Tensor) -> Tensor:
        if self.gather is None:
            return self.sum(self.pad(x))  # adding zeros changes no bit
        joined = self.gather(x).reshape(self.count, -1, self.part)
        return joined.transpose(1, 0, 2).reshape(-1, self.count * self.part)


class FirstLogits(nn.Cell):
    """The first rank's logits [n, vocab] for all: unlike processors may differ in the last bit,
    and ranks that chose different tokens would wait for each other for ever."""

    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()
        self.mine = 1.0 if parallel.ranks.tensor_index == 0 else 0.0
        self.sum = ops.AllReduce(group=parallel.group)

    def construct(self, x: Tensor) -> Tensor:
        return self.sum(x * self.mine)


def summed(parallel: TensorParallel | None) -> Combine | None:
    """The sum over the ranks, for a layer that is cut along its inputs; None for one rank."""
    return None if parallel is None else ops.AllReduce(group=parallel.group)


def shared_logits(parallel: TensorParallel | None, rows: int) -> Combine | None:
    """What makes logits whole behind a head of `rows` outputs here; None for one rank."""
    if parallel is None:
        return None
    return JoinedLogits(parallel, rows) if parallel.cut_vocabulary else FirstLogits(parallel)


def shared_embedding(parallel: TensorParallel | None, rows: int) -> nn.Cell | None:
    """The look-up in an embedding of which `rows` are here; None where it is whole."""
    if parallel is None or not parallel.cut_vocabulary:
        return None
    return SharedEmbedding(parallel, rows)
