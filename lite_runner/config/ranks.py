"""Ranks: which part of a job one process does."""

from __future__ import annotations

from lite_runner.records import dataclass


@dataclass(frozen=True)
class Ranks:
    """One rank among `data * tensor`; neighbours hold the shards of one replica of the model."""

    rank: int = 0
    data: int = 1  # replicas of the model, each with prompts of its own (data parallel)
    tensor: int = 1  # ranks that share a replica (tensor parallel)

    @property
    def size(self) -> int:
        return self.data * self.tensor

    @property
    def data_index(self) -> int:
        return self.rank // self.tensor

    @property
    def tensor_index(self) -> int:
        return self.rank % self.tensor
