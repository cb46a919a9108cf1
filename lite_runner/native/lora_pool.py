"""LoRA adapters as the operators read them: for each layer a pool, a row of numbers for a slot.

A row has A [rank, in] and then B [out / 32, rank, 32] of each matrix of the layer that any adapter
changes, the scale in B, ranks and outputs filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ConfigError
from lite_runner.native.structs import MOST_MATRICES, PANEL, LoraPair
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.tensor import to_bfloat16


@dataclass(frozen=True)
class LoraSize:
    """The slots for a model's adapters, and what fits them."""

    slots: int  # P, adapters that are in memory at a time
    rank: int  # R, the largest of an adapter
    targets: frozenset[str]  # canonical names of the weights that adapters may change
    bfloat16: bool = False  # what our own operators hold them as; MindSpore's do not
    rounded: bool = False  # to bfloat16, those too that it does not hold without a loss

    def check(self, adapter: Adapter) -> None:
        """Raise ConfigError for an adapter that does not fit a slot."""
        faults, hint = [], "load the model anew: its adapters of then say what there is room for"
        rank = max((pair.rank for pair in adapter.pairs.values()), default=0)
        if rank > self.rank:
            faults.append(f"got rank {rank}, expected {self.rank} at most")
        if others := adapter.pairs.keys() - self.targets:
            faults.append(
                f"got {len(others)} weights besides those that adapters may change, such as"
                f" {min(others)}"
            )
        if self.bfloat16 and not (self.rounded or adapter.bfloat16):
            faults.append("got values that bfloat16 does not hold, as it does all the others'")
            hint += ", and adapter_dtype=bf16 rounds any"
        if faults:
            raise ConfigError(
                f"adapter {adapter.name}: {adapter.folder}: does not fit the slots that were made"
                f" when the model was loaded: {'; '.join(faults)}",
                hint,
            )


def pool_size(
    adapters: Sequence[Adapter],
    slots: int,
    rank: int | None = None,
    targets: Collection[str] | None = None,
    *,
    rounded: bool = False,
) -> LoraSize:
    """Room for `adapters`, `slots` of them at a time; `rounded`: to bfloat16.

    `rank` and `targets`, canonical names of weights, are the maxima of adapters to come, needed
    where there are none yet. Raises ConfigError for one of `adapters` that does not fit them.
    """
    pairs = [item for adapter in adapters for item in adapter.pairs.items()]
    if rank is None:
        rank = max(pair.rank for _, pair in pairs)
    if targets is None:
        targets = {name for name, _ in pairs}
    exact = bool(adapters) and all(adapter.bfloat16 for adapter in adapters)
    size = LoraSize(slots, rank, frozenset(targets), rounded or exact, rounded)
    for adapter in adapters:
        size.check(adapter)
    return size


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
    """Where a slot of a layer's pool has what."""

    rank: int
    targets: tuple[Target | None, ...]  # in the layer's order; None: no adapter changes that one
    bfloat16: bool = False  # the numbers are uint16, upper halves of float32

    @property
    def width(self) -> int:
        """Numbers of a slot."""
        return sum(self.rank * (one.inputs + one.filled) for one in self.targets if one)

    @property
    def dtype(self) -> type[np.generic]:
        return np.uint16 if self.bfloat16 else np.float32

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.targets if one}

    def parts(self) -> LoraPair:
        """Where a slot has A and B of each matrix."""
        down, up, at = [-1] * MOST_MATRICES, [-1] * MOST_MATRICES, 0
        for index, one in enumerate(self.targets):
            if one:
                down[index] = at
                up[index] = at + self.rank * one.inputs
                at = up[index] + self.rank * one.filled
        return LoraPair(self.rank, tuple(down), tuple(up))

    def row(self, adapter: Adapter) -> NDArray[Any]:
        """An adapter's numbers in a slot [width]."""
        parts: list[NDArray[np.float32]] = []
        for one in self.targets:
            if one:
                a, b = adapter.filled(one.name, self.rank, one.inputs, one.filled)
                parts += [a.T if one.looked_up else a]
                parts += [b.reshape(-1, PANEL, self.rank).swapaxes(1, 2)]
        numbers: NDArray[Any] = np.concatenate([part.reshape(-1) for part in parts])
        return to_bfloat16(numbers) if self.bfloat16 else numbers
