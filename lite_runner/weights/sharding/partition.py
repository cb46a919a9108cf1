"""How a model's tensors are sharded for tensor parallelism.

A column-parallel layer (q, k, v, gate, up) is split along its outputs, the following row-parallel
one (the output projection, down) along its inputs; everything after an all-reduce is replicated.
The embedding and the head are vocabulary-parallel.
"""

from __future__ import annotations

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.ranks import Ranks
from lite_runner.records import dataclass


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
    outputs = last if parameter.layout == "in_out" else 0
    if parameter.split == "vocabulary":
        return Cut(0, tensor) if vocab_parallel else Cut()
    if parameter.split == "outputs":
        return Cut(outputs, tensor)
    if parameter.split == "key_heads":
        return Cut(outputs, min(tensor, model.n_kv_heads))
    if parameter.split == "inputs":
        return Cut(last - outputs, tensor)
    return Cut()
