"""LoRA adapters of a model, opened but not loaded: values stay on disk until they are read.

An adapter adds scale * B (A x) to the output of a weight W for the input x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights.derive import same_values
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.tensor import LazyTensor, widened


@dataclass(frozen=True)
class LoraPair:
    """What an adapter adds to one weight: scale * b @ a, as [out, in] whatever the weight's own
    layout. An embedding takes tokens in and gives hidden states out."""

    a: LazyTensor  # [r, in]
    b: LazyTensor  # [out, r]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def values(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A [r, in] and scale * B [out, r], of which nothing stays in memory but these."""
        a, b = self.a.read(), self.b.read()
        found = widened(a).copy(), widened(b) * np.float32(self.scale)
        for stored in (a, b):
            drop_pages(stored)
        return found


@dataclass(frozen=True)
class Adapter:
    """One adapter; `pairs` by the canonical name of the base weight, in the model's order.

    A tied head has the name of one of its own, lm_head.weight; an adapter of the embedding leaves
    it alone, and so the other way round, as in PEFT.
    """

    name: str
    folder: Path
    pairs: Mapping[str, LoraPair]
    copies: Mapping[str, LazyTensor] = field(default_factory=dict)  # of base weights, by name

    @property
    def bfloat16(self) -> bool:
        """Whether A and scale * B are held as bfloat16 without a loss."""
        return all(
            pair.a.dtype == pair.b.dtype == "BF16" and abs(math.frexp(pair.scale)[0]) == 0.5
            for pair in self.pairs.values()
        )

    def padded(
        self, name: str, rank: int, inputs: int, outputs: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A [rank, inputs] and scale * B [outputs, rank] of a weight, filled up with zeros; only
        zeros where the adapter leaves it alone."""
        a = np.zeros((rank, inputs), np.float32)
        b = np.zeros((outputs, rank), np.float32)
        if (pair := self.pairs.get(name)) is not None:
            a[: pair.rank], b[: pair.b.shape[0], : pair.rank] = pair.values()
        return a, b

    def check_effective(self) -> None:
        """Raise ArtifactError if all products B A are zero; reads values until one is not."""
        for pair in self.pairs.values():
            if all(values.any() for values in pair.values()):
                return
        raise ArtifactError(
            f"adapter {self.name}: {self.folder}: changes nothing, the products of all "
            f"{len(self.pairs)} pairs of A and B are zero",
            "an adapter begins so; this one was saved before it was trained",
        )

    def check_copies(self, base: Mapping[str, LazyTensor]) -> None:
        """Raise ArtifactError if the embedding or head saved with the adapter differs from that of
        `base`, which peft would replace with it."""
        for name, copy in self.copies.items():
            if not same_values(copy, base[name]):
                raise ArtifactError(
                    f"adapter {self.name}: {self.folder}: holds a whole {name} that is not the "
                    "base's; only plain LoRA is supported",
                    "load the base that the adapter was trained on",
                )
