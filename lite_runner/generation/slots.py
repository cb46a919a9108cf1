"""Contents of a backend's cache slots, for prefix caching."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import BackendInfo, Row, StoredPrefix
from lite_runner.records import dataclass

# Copying a slot costs as much as computing a fraction of its length: shorter prefixes are
# recomputed.
_SHORTEST_COPY = 32
_COPIED_PART = 16


@dataclass(frozen=True)
class Placement:
    """The slot of a prompt and its cached prefix."""

    slot: int
    source: int  # the slot that has, or will have, the prefix; may be `slot` itself
    cached: int  # tokens of the prefix


@dataclass(frozen=True)
class CopySlots:
    """Copy slot sources[i] to targets[i]; all are read before any is written."""

    sources: list[int]
    targets: list[int]


@dataclass(frozen=True)
class ReleaseSlot:
    """Free the memory of a slot's tokens from `length` on."""

    slot: int
    length: int


SlotWork = CopySlots | ReleaseSlot | StoredPrefix


class Slots:
    """Tokens per slot, the adapter that computed them, and the time of last use."""

    def __init__(self, info: BackendInfo, *, prefix_cache: bool) -> None:
        self._info, self._share = info, prefix_cache and info.can_continue
        # Memory pages are allocated on first write.
        self._tokens = np.zeros((info.slots, info.max_length), np.int32)
        self._cached = [0] * info.slots  # reusable tokens
        self._planned = [0] * info.slots  # reusable tokens once its prefill is complete
        self._adapter = [-1] * info.slots
        self._used = [0] * info.slots
        self._clock = 0
        self._blocks = [0] * info.slots  # of memory that each has

    def blocks(self, slots: Iterable[int]) -> int:
        """Blocks of memory that some slots have."""
        return sum(self._blocks[slot] for slot in slots)

    def release(self, slot: int, length: int) -> bool:
        """Free the memory after the first `length` tokens; True if there was any."""
        assert self._info.memory is not None
        self.truncate(slot, length)
        blocks = self._info.memory.blocks_of(length)
        released = blocks < self._blocks[slot]
        self._blocks[slot] = min(blocks, self._blocks[slot])
        return released

    def cached(self, slot: int) -> int:
        """Tokens that another sequence can reuse."""
        return self._cached[slot]

    def complete(self, slot: int) -> bool:
        """True if no prefill is in progress."""
        return self._cached[slot] >= self._planned[slot]

    def by_last_use(self, free: Sequence[int]) -> list[int]:
        """Free slots, least recently used first."""
        return sorted(free, key=lambda slot: (self._used[slot], slot))

    def place(
        self,
        prompt: NDArray[np.int32],
        adapter: int,
        free: Sequence[int],
        ahead: Collection[int] = (),
    ) -> Placement:
        """One of the `free` slots for a prompt, and its longest prefix in any slot; in slots
        `ahead` also one whose prefill is in progress.

        The prompt's last token is always recomputed for its logits.
        """
        oldest = self.by_last_use(free)
        best, order = Placement(oldest[0], oldest[0], 0), (0, False, 0)
        shortest = max(_SHORTEST_COPY, self._info.max_length // _COPIED_PART)
        for slot, length in self._prefixes(prompt[:-1], adapter, ahead):
            others = [one for one in oldest if one != slot]
            can_copy = self._info.can_copy and length >= shortest and bool(others)
            # Continue in a free slot, unless that would evict more than it saves.
            stays = slot in free and not (can_copy and 2 * length < self._cached[slot])
            if not (stays or can_copy):
                continue
            ready = min(length, self._cached[slot])
            if (length, stays, ready) > order:
                best = Placement(slot if stays else others[0], slot, length)
                order = (length, stays, ready)
        return best

    def begin(self, slot: int, prompt: NDArray[np.int32], adapter: int) -> None:
        """Start the prefill of a prompt in a slot, after the tokens that `truncate` keeps."""
        self._touch(slot)
        self._tokens[slot, : len(prompt)] = prompt
        self._planned[slot], self._adapter[slot] = len(prompt), adapter

    def truncate(self, slot: int, length: int) -> None:
        """Keep only the first `length` tokens of a slot."""
        self._cached[slot] = self._planned[slot] = min(self._cached[slot], length)

    def abandon(self, slot: int) -> None:
        """Abandon the rest of a prefill."""
        self._planned[slot] = self._cached[slot]

    def tokens(self, slot: int, end: int) -> NDArray[np.int32]:
        """The first tokens of a slot."""
        return self._tokens[slot, :end]

    def restored(self, slot: int, end: int) -> None:
        """Record that the first tokens of a prompt that `begin` was given came from a file."""
        self._cached[slot] = end
        self._grew(slot, end)

    def wrote(self, row: Row, *, of_prompt: bool) -> None:
        """Record a computed row."""
        self._touch(row.slot)
        slot, start, end = row.slot, row.position, row.position + len(row.tokens)
        self._tokens[slot, start:end] = row.tokens
        self._grew(slot, end)
        cached = min(self._cached[slot], start)
        # If logits are not batch-invariant, only prefilled tokens are reused.
        if cached == start and (of_prompt or self._info.exact):
            cached = end
        self._cached[slot] = cached
        if not of_prompt:
            self._planned[slot] = cached

    def copied(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Record copies of slots sources[i] to targets[i]."""
        for array in (self._cached, self._planned, self._adapter):
            for target, value in zip(targets, [array[one] for one in sources], strict=True):
                array[target] = value
        self._tokens[list(targets)] = self._tokens[list(sources)]
        for source, target in zip(sources, targets, strict=True):
            self._blocks[target] = max(self._blocks[source], self._blocks[target])
            self._touch(target)

    def _prefixes(
        self, prompt: NDArray[np.int32], adapter: int, ahead: Collection[int]
    ) -> Iterator[tuple[int, int]]:
        """Slots with a prefix of a prompt, and the prefix's usable length."""
        if not self._share or not len(prompt):
            return
        for slot, by in enumerate(self._adapter):
            usable = self._info.usable
            # Where a prefill that is in progress will leave states is not known.
            ahead_too = slot in ahead and usable is None
            there = self._planned[slot] if ahead_too else self._cached[slot]
            length = min(len(prompt), there)
            if by != adapter or not length or self._tokens[slot, 0] != prompt[0]:
                continue
            differing = np.flatnonzero(self._tokens[slot, :length] != prompt[:length])
            length = int(differing[0]) if len(differing) else length
            length -= length % self._info.chunk
            if usable is not None:
                length = usable(slot, length)
            if length:
                yield slot, length

    def _grew(self, slot: int, length: int) -> None:
        if (memory := self._info.memory) is not None:
            self._blocks[slot] = max(self._blocks[slot], memory.blocks_of(length))

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
