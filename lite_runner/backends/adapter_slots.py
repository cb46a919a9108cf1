"""The adapters of a backend, by name: some of them in slots in memory, the others on disk."""

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

    Which adapter is in which slot depends on the order of the calls alone.
    """

    def __init__(self, network: nn.Cell, adapters: Sequence[Adapter], size: LoraSize) -> None:
        """`adapters`, which may be none, are this rank's pieces.

        Raises ArtifactError where the network has no room for one of the layers that they may
        change, ConfigError for an adapter that does not fit the `size`.
        """
        cells = [cell for _, cell in network.cells_and_names()]
        self._layers = [cell for cell in cells if isinstance(cell, Lora) and cell.names]
        self._tables = [cell for cell in cells if isinstance(cell, EmbeddingLora) and cell.names]
        self._pools = [
            pool for cell in cells if isinstance(cell, NativeNetwork) for pool in cell.adapters
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
        # MindSpore's cells hold adapters in the type that they compute in.
        self._size = size if self._pools else replace(size, bfloat16=False)
        self.slots = size.slots
        self.loads = 0
        held = [pool for _, pool in self._pools]
        for cell in self._layers:
            held += [cell.a, *cell.b]
        for table in self._tables:
            held += [table.a, table.b]
        self.nbytes = sum(one.nbytes for one in held)
        self._known: dict[str, tuple[Adapter, int]] = {}  # with its version
        self._versions = count(1)
        self._held: dict[str, int] = {}  # slots by name, the least recently used first
        self._pins: Counter[str] = Counter()
        for adapter in adapters:
            self.add(adapter)

    def add(self, adapter: Adapter) -> None:
        """Know an adapter from now on, in the place of one of its name.

        Raises ConfigError where it does not fit a slot, or while the one of its name is pinned.
        """
        self._size.check(adapter)
        self._drop(adapter.name)
        self._known[adapter.name] = adapter, next(self._versions)

    def remove(self, name: str) -> None:
        """Forget an adapter. Raises ConfigError where it is not known, or pinned."""
        self._find(name)
        self._drop(name)
        del self._known[name]

    def version(self, name: str) -> int:
        """A number that no other adapter has or had, not even of the same name.

        Raises ConfigError for an unknown name, with the nearest known one.
        """
        return self._find(name)[1]

    def pin(self, name: str) -> int | None:
        """The slot of an adapter, loaded if need be, which stays there until it is unpinned as
        often; None while all slots are pinned. The least recently used makes room.

        Raises ConfigError for an unknown name.
        """
        adapter, _ = self._find(name)
        if name not in self._held:
            slot = self._room()
            if slot is None:
                return None
            self._load(adapter, slot)
            self._held[name] = slot
            self.loads += 1
        self._pins[name] += 1
        return self._held[name]

    def unpin(self, name: str) -> None:
        """Let another adapter have the slot when it needs one."""
        assert self._pins[name] > 0, f"adapter {name} is not pinned"
        self._pins[name] -= 1
        self._held[name] = self._held.pop(name)  # used until now

    def _find(self, name: str) -> tuple[Adapter, int]:
        if name not in self._known:
            listed = ", ".join(list(self._known)[:20])
            raise ConfigError(
                f"no adapter {name!r}{did_you_mean(nearest(name, self._known))}",
                f"there are: {listed}" if listed else "there is none so far: add it first",
            )
        return self._known[name]

    def _drop(self, name: str) -> None:
        """Free the slot that an adapter may have."""
        if self._pins[name]:
            raise ConfigError(
                f"adapter {name} is in use, and stays until all requests for it are finished",
                "try again then, or give the new one another name",
            )
        self._held.pop(name, None)

    def _room(self) -> int | None:
        free = set(range(self.slots)) - set(self._held.values())
        if free:
            return min(free)
        idle = next((name for name in self._held if not self._pins[name]), None)
        return None if idle is None else self._held.pop(idle)

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
            _write(cell.a, rows, np.concatenate([down for down, _ in parts]))
            for (_, up), b in zip(parts, cell.b, strict=True):
                _write(b, slot * rank + span, up.T)
        for table in self._tables:
            tokens = table.vocabulary
            down, up = adapter.padded(table.names[0], rank, tokens, table.b.shape[1])
            _write(table.a, slot * tokens + np.arange(tokens), down.T)
            _write(table.b, slot * rank + span, up.T)


def _write(target: Parameter, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
    update, new = ops.ScatterUpdate(), Tensor(np.ascontiguousarray(values))
    update(target, Tensor(rows.astype(np.int32)), new.astype(target.dtype))
