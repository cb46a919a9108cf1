"""Tensor parallelism: the collectives between the ranks of a replica.

Layers are sharded manually with AllReduce (sum) and AllGather only: MindSpore has no others on CPU,
and its own sharding does not work there. `lite_runner.weights.sharding.partition` defines how each
tensor is sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, nn, ops

from lite_runner.config.sections import Ranks
from lite_runner.records import dataclass

Combine = Callable[[Tensor], Tensor]  # a collective over the ranks' tensors


@dataclass(frozen=True)
class TensorParallel:
    """This rank's position in its tensor-parallel group."""

    ranks: Ranks
    group: str  # communication group: the ranks of this replica
    gathers: bool  # AllGather works in the group; on CPU only in the world group
    vocab_parallel: bool  # False: embedding and head are replicated

    def heads(self, local: int) -> slice:
        """The indices of this rank's `local` heads among the model's."""
        return slice(self.ranks.tensor_index * local, (self.ranks.tensor_index + 1) * local)


class SharedEmbedding(nn.Cell):
    """Vocabulary-parallel embedding lookup in a table [vocab, hidden]."""

    def __init__(self, parallel: TensorParallel, rows: int) -> None:
        """`rows`: of this rank's shard."""
        super().__init__()
        self.start, self.rows = parallel.ranks.tensor_index * rows, rows
        self.gather = ops.Gather()
        self.sum = ops.AllReduce(group=parallel.group)

    def construct(self, table: Tensor, indices: Tensor) -> Tensor:
        """Indices [n] into the full table -> [n, hidden] float32; each row is on one rank, the
        others add zeros."""
        local = indices - self.start
        inside = ops.logical_and(local >= 0, local < self.rows)
        local = ops.minimum(ops.maximum(local, 0), self.rows - 1)
        found = self.gather(table, local, 0).astype(ms.float32)
        return self.sum(found * inside.astype(ms.float32).reshape(-1, 1))


class JoinedLogits(nn.Cell):
    """Gathers logit shards [n, vocab / ranks] -> [n, vocab], bit-identical on every rank."""

    def __init__(self, parallel: TensorParallel, part: int) -> None:
        """`part`: vocabulary size of this rank's shard."""
        super().__init__()
        self.count, self.part = parallel.ranks.tensor, part
        self.gather = ops.AllGather(group=parallel.group) if parallel.gathers else None
        before = parallel.ranks.tensor_index * part
        behind = self.count * part - part - before
        self.pad = ops.Pad(((0, 0), (before, behind)))
        self.sum = ops.AllReduce(group=parallel.group)

    def construct(self, x: Tensor) -> Tensor:
        if self.gather is None:
            return self.sum(self.pad(x))  # adding zeros is exact
        joined = self.gather(x).reshape(self.count, -1, self.part)
        return joined.transpose(1, 0, 2).reshape(-1, self.count * self.part)


class FirstLogits(nn.Cell):
    """Broadcasts the first rank's logits [n, vocab]: different processors may differ in the last
    bit, and ranks that choose different tokens would deadlock."""

    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()
        self.mine = 1.0 if parallel.ranks.tensor_index == 0 else 0.0
        self.sum = ops.AllReduce(group=parallel.group)

    def construct(self, x: Tensor) -> Tensor:
        return self.sum(x * self.mine)


def summed(parallel: TensorParallel | None) -> Combine | None:
    """All-reduce for a row-parallel layer; None for one rank."""
    return None if parallel is None else ops.AllReduce(group=parallel.group)


def shared_logits(parallel: TensorParallel | None, rows: int) -> Combine | None:
    """The collective behind a head with `rows` outputs on this rank; None for one rank."""
    if parallel is None:
        return None
    return JoinedLogits(parallel, rows) if parallel.vocab_parallel else FirstLogits(parallel)


def shared_embedding(parallel: TensorParallel | None, rows: int) -> nn.Cell | None:
    """The lookup in a vocabulary-parallel embedding with `rows` on this rank; None if
    replicated."""
    if parallel is None or not parallel.vocab_parallel:
        return None
    return SharedEmbedding(parallel, rows)
