"""Ranks: which part of a job one process does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lite_runner.config.model import ModelConfig


@dataclass(frozen=True)
class Ranks:
    """One rank among `data * tensor`; neighbours hold the parts of one copy of the model."""

    rank: int = 0
    data: int = 1  # copies of the model, each with prompts of its own (data parallel)
    tensor: int = 1  # ranks that share a copy (tensor parallel)

    @property
    def size(self) -> int:
        return self.data * self.tensor

    @property
    def data_index(self) -> int:
        return self.rank // self.tensor

    @property
    def tensor_index(self) -> int:
        return self.rank % self.tensor


def local_model(model: ModelConfig, tensor: int) -> ModelConfig:
    """The sizes of one rank's part; hidden_size and vocab_size stay those of the whole."""
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tensor,
        n_kv_heads=max(1, model.n_kv_heads // tensor),
        intermediate_size=model.intermediate_size // tensor,
    )
