"""A backend's adapters by name: some loaded in adapter slots, the others on disk (LRU)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Protocol

from lite_runner.config import did_you_mean, nearest
from lite_runner.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from lite_runner.weights.lora.adapter import Adapter, LoraSize


class AdapterPools(Protocol):
    """The adapter slots of a network's layers."""

    @property
    def names(self) -> set[str]:
        """Canonical names of the weights that adapters may target."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def holds_bfloat16(self) -> bool:
        """True if adapters in bfloat16 are stored so."""
        ...

    def load(self, adapter: Adapter, slot: int) -> None: ...


class AdapterSlots:
    """A backend's adapters by name; a row's adapter must be loaded in one of a few slots.

    Slot assignment depends only on the order of the calls.
    """

    def __init__(self, pools: AdapterPools, adapters: Sequence[Adapter], size: LoraSize) -> None:
        """`adapters` (may be empty) are this rank's shards.

        Raises ArtifactError if the network does not support one of the targets, ConfigError for an
        adapter that does not fit `size`.
        """
        if missing := size.targets - pools.names:
            raise ArtifactError(
                f"adapters: this network takes none for {len(missing)} of their "
                f"{len(size.targets)} weights, such as {min(missing)}",
                "a custom network (lite_runner.register) has to add the LoRA deltas itself",
            )
        self._pools = pools
        self._size = size if pools.holds_bfloat16 else replace(size, bfloat16=False)
        self.slots = size.slots
        self.loads = 0  # into a slot, so far
        self.nbytes = pools.nbytes  # of all slots
        self._known: dict[str, tuple[Adapter, int]] = {}  # name -> adapter, version
        self._versions = count(1)
        self._digests: dict[int, str] = {}  # by version
        self._loaded: dict[str, int] = {}  # name -> slot, least recently used first
        self._pins: Counter[str] = Counter()
        for adapter in adapters:
            self.add(adapter)

    def check(self, adapter: Adapter) -> None:
        """Raise ConfigError if an adapter does not fit a slot."""
        self._size.check(adapter)

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

    def version(self, name: str) -> int:
        """A number unique to this adapter, even among adapters of the same name over time.

        Raises ConfigError for an unknown name, suggesting the nearest one.
        """
        return self._find(name)[1]

    def digest(self, name: str) -> str:
        """SHA-256 of an adapter's values, and of how a slot holds them.

        Raises ConfigError for an unknown name.
        """
        adapter, version = self._find(name)
        if version not in self._digests:
            self._digests[version] = adapter.digest(f"{self._size.rank} {self._size.bfloat16}")
        return self._digests[version]

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
            self._pools.load(adapter, slot)
            self._loaded[name] = slot
            self.loads += 1
        self._pins[name] += 1
        return self._loaded[name]

    def unpin(self, name: str) -> None:
        """Allow the adapter to be evicted."""
        assert self._pins[name] > 0, f"adapter {name} is not pinned"
        self._pins[name] -= 1
        if not self._pins[name]:
            del self._pins[name]  # names come and go without end
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
        """Forget an adapter, if it is known, and free its slot."""
        if self._pins[name]:
            raise ConfigError(
                f"adapter {name} is in use, and stays until all requests for it are finished",
                "try again then, or give the new one another name",
            )
        self._loaded.pop(name, None)
        if name in self._known:
            _, version = self._known.pop(name)
            self._digests.pop(version, None)

    def _evict(self) -> int | None:
        """A free slot, evicting the least recently used unpinned adapter if necessary."""
        free = set(range(self.slots)) - set(self._loaded.values())
        if free:
            return min(free)
        idle = next((name for name in self._loaded if not self._pins[name]), None)
        return None if idle is None else self._loaded.pop(idle)
