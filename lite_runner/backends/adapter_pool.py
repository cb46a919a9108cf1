"""The adapters that are on the device: some of all, the least recently used makes room."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError, RunnerError
from lite_runner.models.fused import FusedNetwork
from lite_runner.models.lora import EmbeddingLora, Lora, LoraSize
from lite_runner.weights.adapter import Adapter


def pool_size(adapters: Sequence[Adapter], places: int, *, rounded: bool = False) -> LoraSize:
    """The pool for `adapters`, of which `places` are loaded at a time; `rounded`: to bfloat16."""
    targets = frozenset(name for adapter in adapters for name in adapter.pairs)
    rank = max(pair.rank for adapter in adapters for pair in adapter.pairs.values())
    bfloat16 = rounded or all(adapter.bfloat16 for adapter in adapters)
    return LoraSize(min(places, len(adapters)), rank, targets, bfloat16)


class AdapterPool:
    """Adapters by number, from 1; 0 is the base model. Those not loaded stay on disk."""

    def __init__(self, network: nn.Cell, adapters: Sequence[Adapter], size: LoraSize) -> None:
        """`adapters` are this rank's pieces. Raises ArtifactError where the network has no room
        for one of the layers they change."""
        cells = [cell for _, cell in network.cells_and_names()]
        self._layers = [cell for cell in cells if isinstance(cell, Lora) and cell.names]
        self._tables = [cell for cell in cells if isinstance(cell, EmbeddingLora) and cell.names]
        self._pools = [
            pool for cell in cells if isinstance(cell, FusedNetwork) for pool in cell.adapters
        ]
        there = {name for cell in self._layers for name in cell.names}
        there |= {name for table in self._tables for name in table.names}
        there |= {name for layout, _ in self._pools for name in layout.names}
        if missing := size.targets - there:
            raise ArtifactError(
                f"adapters: this network takes none for {len(missing)} of their "
                f"{len(size.targets)} weights, such as {min(missing)}",
                "a family of lite_runner.register has to add them itself",
            )
        self.places = size.places
        self.loads = 0
        self.seconds = [0.0] * (1 + len(adapters))  # spent on the rows of each, the base first
        self._rank = size.rank
        self._adapters = adapters
        self._held: dict[int, int] = {}  # adapter -> place, the least recently used first
        self._kept: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of the pool on the device."""
        layers = [(cell.a, *cell.b) for cell in self._layers]
        tables = [(cell.a, cell.b) for cell in self._tables]
        pools = [(pool,) for _, pool in self._pools]
        return sum(one.nbytes for group in (*layers, *tables, *pools) for one in group)

    def spent(self, seconds: float, adapters: Sequence[int]) -> None:
        """A step of these rows took so long; each had an equal part in it."""
        for adapter in adapters:
            self.seconds[adapter] += seconds / len(adapters)

    def keep(self, adapters: Collection[int]) -> None:
        """Rows of these are in flight, or about to be: none of them makes room."""
        self._kept = frozenset(adapters)

    def places_of(self, adapters: Sequence[int]) -> list[int]:
        """Where the rows of a step find theirs, loaded if need be; `places` for the base.

        Raises RunnerError where more adapters are in use than can be loaded.
        """
        together = set(adapters) - {0}
        for adapter in sorted(together & self._held.keys()):
            self._held[adapter] = self._held.pop(adapter)
        for adapter in sorted(together - self._held.keys()):
            place = self._room(together)
            self._load(self._adapters[adapter - 1], place)
            self._held[adapter] = place
            self.loads += 1
        return [self._held.get(adapter, self.places) for adapter in adapters]

    def _room(self, together: Collection[int]) -> int:
        if len(self._held) < self.places:
            return len(self._held)
        for adapter in self._held:
            if adapter not in self._kept and adapter not in together:
                return self._held.pop(adapter)
        raise RunnerError(
            f"all {self.places} adapters that can be loaded are in use, and one more is wanted",
            "max_loaded_adapters= more",
        )

    def _load(self, adapter: Adapter, place: int) -> None:
        for layout, pool in self._pools:
            _write(pool, np.array([place]), layout.row(adapter)[None])
        rank = self._rank
        span = np.arange(rank)
        for cell in self._layers:
            parts = [
                adapter.filled(name, rank, cell.a.shape[1], b.shape[1])
                for name, b in zip(cell.names, cell.b, strict=True)
            ]
            starts = (np.arange(len(parts)) * self.places + place) * rank
            rows = (starts[:, None] + span).reshape(-1)
            _write(cell.a, rows, np.concatenate([down for down, _ in parts]))
            for (_, up), b in zip(parts, cell.b, strict=True):
                _write(b, place * rank + span, up.T)
        for table in self._tables:
            count = table.vocabulary
            down, up = adapter.filled(table.names[0], rank, count, table.b.shape[1])
            _write(table.a, place * count + np.arange(count), down.T)
            _write(table.b, place * rank + span, up.T)


def _write(target: Parameter, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
    update, new = ops.ScatterUpdate(), Tensor(np.ascontiguousarray(values))
    update(target, Tensor(rows.astype(np.int32)), new.astype(target.dtype))
