"""LoRA adapters as the operators read them: for each layer a pool, a row of numbers for a place.

A row has A [rank, in] and then B [out / 32, rank, 32] of each matrix of the layer that any adapter
changes, the scale in B, ranks and outputs filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.kernels.structs import MOST_MATRICES, PANEL, AdapterParts
from lite_runner.weights.adapter import Adapter
from lite_runner.weights.tensor import to_bfloat16


@dataclass(frozen=True)
class LoraSize:
    """The pool of a model's adapters, and what it is for."""

    places: int  # P, adapters that are loaded at a time
    rank: int  # R, the largest of all adapters
    targets: frozenset[str]  # canonical names of the weights that any adapter changes
    bfloat16: bool = False  # what our own operators hold them as; MindSpore's do not


@dataclass(frozen=True)
class Target:
    """A matrix that adapters may change."""

    name: str  # canonical, of its weight
    inputs: int
    outputs: int
    looked_up: bool = False  # an embedding: A is kept [inputs, rank], to take one row of it

    @property
    def filled(self) -> int:
        """Outputs in whole panels."""
        return -(-self.outputs // PANEL) * PANEL


@dataclass(frozen=True)
class PoolLayout:
    """Where a place of a layer's pool has what."""

    rank: int
    targets: tuple[Target | None, ...]  # in the layer's order; None: no adapter changes that one
    bfloat16: bool = False  # the numbers are uint16, upper halves of float32

    @property
    def width(self) -> int:
        """Numbers of a place."""
        return sum(self.rank * (one.inputs + one.filled) for one in self.targets if one)

    @property
    def dtype(self) -> type[np.generic]:
        return np.uint16 if self.bfloat16 else np.float32

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.targets if one}

    def parts(self) -> AdapterParts:
        """Where a place has A and B of each matrix."""
        down, up, at = [-1] * MOST_MATRICES, [-1] * MOST_MATRICES, 0
        for index, one in enumerate(self.targets):
            if one:
                down[index] = at
                up[index] = at + self.rank * one.inputs
                at = up[index] + self.rank * one.filled
        return AdapterParts(self.rank, tuple(down), tuple(up))

    def row(self, adapter: Adapter) -> NDArray[Any]:
        """An adapter's place [width]."""
        parts: list[NDArray[np.float32]] = []
        for one in self.targets:
            if one:
                a, b = adapter.filled(one.name, self.rank, one.inputs, one.filled)
                parts += [a.T if one.looked_up else a]
                parts += [b.reshape(-1, PANEL, self.rank).swapaxes(1, 2)]
        numbers: NDArray[Any] = np.concatenate([part.reshape(-1) for part in parts])
        return to_bfloat16(numbers) if self.bfloat16 else numbers
