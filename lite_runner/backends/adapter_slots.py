"""A backend's adapters by name: some loaded in adapter slots, the others on disk (LRU)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.native.lora_pool import LoraSize
from lite_runner.networks.lora import EmbeddingLora, Lora
from lite_runner.networks.native import NativeNetwork
from lite_runner.weights.lora.adapter import Adapter


class LoraSlots:
    """See `lite_runner.backends.base.AdapterSlots`.

    Slot assignment depends only on the order of the calls.
    """

    def __init__(self, network: nn.Cell, adapters: Sequence[Adapter], size: LoraSize) -> None:
        """`adapters` (may be empty) are this rank's shards.

        Raises ArtifactError if the network does not support one of the targets, ConfigError for an
        adapter that does not fit `size`.
        """
        cells = [cell for _, cell in network.cells_and_names()]
        self._layers = [cell for cell in cells if isinstance(cell, Lora) and cell.names]
        self._tables = [cell for cell in cells if isinstance(cell, EmbeddingLora) and cell.names]
        self._pools = [
            pool for cell in cells if isinstance(cell, NativeNetwork) for pool in cell.adapters
        ]
        supported = {name for cell in self._layers for name in cell.names}
        supported |= {name for table in self._tables for name in table.names}
        supported |= {name for layout, _ in self._pools for name in layout.names}
        if missing := size.targets - supported:
            raise ArtifactError(
                f"adapters: this network takes none for {len(missing)} of their "
                f"{len(size.targets)} weights, such as {min(missing)}",
                "a custom network (lite_runner.register) has to add the LoRA deltas itself",
            )
        # MindSpore cells store adapters in their compute type.
        self._size = size if self._pools else replace(size, bfloat16=False)
        self.slots = size.slots
        self.loads = 0
        held = [pool for _, pool in self._pools]
        for cell in self._layers:
            held += [cell.a, *cell.b]
        for table in self._tables:
            held += [table.a, table.b]
        self.nbytes = sum(one.nbytes for one in held)
        self._known: dict[str, tuple[Adapter, int]] = {}  # name -> adapter, version
        self._versions = count(1)
        self._loaded: dict[str, int] = {}  # name -> slot, least recently used first
        self._pins: Counter[str] = Counter()
        for adapter in adapters:
            self.add(adapter)

    def add(self, adapter: Adapter) -> None:
        """Register an adapter, replacing one of the same name.

        Raises ConfigError if it does not fit a slot, or while the one it replaces is pinned.
        """
        self._size.check(adapter)
        self._drop(adapter.name)
        self._known[adapter.name] = adapter, next(self._versions)

    def remove(self, name: str) -> None:
        """Unregister an adapter. Raises ConfigError if it is unknown or pinned."""
        self._find(name)
        self._drop(name)
        del self._known[name]

    def version(self, name: str) -> int:
        """A number unique to this adapter, even among adapters of the same name over time.

        Raises ConfigError for an unknown name, suggesting the nearest one.
        """
        return self._find(name)[1]

    def pin(self, name: str) -> int | None:
        """The slot of an adapter, loaded if necessary; it stays until it is unpinned as often as
        pinned. None while all slots are pinned; else the least recently used is evicted.

        Raises ConfigError for an unknown name.
        """
        adapter, _ = self._find(name)
        if name not in self._loaded:
            slot = self._evict()
            if slot is None:
                return None
            self._load(adapter, slot)
            self._loaded[name] = slot
            self.loads += 1
        self._pins[name] += 1
        return self._loaded[name]

    def unpin(self, name: str) -> None:
        """Allow the adapter to be evicted."""
        assert self._pins[name] > 0, f"adapter {name} is not pinned"
        self._pins[name] -= 1
        self._loaded[name] = self._loaded.pop(name)  # most recently used

    def _find(self, name: str) -> tuple[Adapter, int]:
        if name not in self._known:
            listed = ", ".join(list(self._known)[:20])
            raise ConfigError(
                f"no adapter {name!r}{did_you_mean(nearest(name, self._known))}",
                f"known are: {listed}" if listed else "there is none so far: add it first",
            )
        return self._known[name]

    def _drop(self, name: str) -> None:
        """Free the slot of an adapter, if loaded."""
        if self._pins[name]:
            raise ConfigError(
                f"adapter {name} is in use, and stays until all requests for it are finished",
                "try again then, or give the new one another name",
            )
        self._loaded.pop(name, None)

    def _evict(self) -> int | None:
        """A free slot, evicting the least recently used unpinned adapter if necessary."""
        free = set(range(self.slots)) - set(self._loaded.values())
        if free:
            return min(free)
        idle = next((name for name in self._loaded if not self._pins[name]), None)
        return None if idle is None else self._loaded.pop(idle)

    def _load(self, adapter: Adapter, slot: int) -> None:
        for layout, pool in self._pools:
            _write(pool, np.array([slot]), layout.row(adapter)[None])
        rank = self._size.rank
        span = np.arange(rank)
        for cell in self._layers:
            parts = [
                adapter.padded(name, rank, cell.a.shape[1], b.shape[1])
                for name, b in zip(cell.names, cell.b, strict=True)
            ]
            starts = (np.arange(len(parts)) * self.slots + slot) * rank
            rows = (starts[:, None] + span).reshape(-1)
            _write(cell.a, rows, np.concatenate([lora_a for lora_a, _ in parts]))
            for (_, lora_b), b in zip(parts, cell.b, strict=True):
                _write(b, slot * rank + span, lora_b.T)
        for table in self._tables:
            tokens = table.vocabulary
            lora_a, lora_b = adapter.padded(table.names[0], rank, tokens, table.b.shape[1])
            _write(table.a, slot * tokens + np.arange(tokens), lora_a.T)
            _write(table.b, slot * rank + span, lora_b.T)


def _write(target: Parameter, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
    update, new = ops.ScatterUpdate(), Tensor(np.ascontiguousarray(values))
    update(target, Tensor(rows.astype(np.int32)), new.astype(target.dtype))
