"""Tokens in a backend's cache slots, for prefix caching, and the memory that they need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import BackendInfo, Row
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from lite_runner.backends.block_pool import BlockPool, Part
    from lite_runner.generation.decoding import SequenceGroup

# Copying a slot, or the block that a prefix ends in, costs as much as computing some tokens, and a
# fraction of the slot's length: shorter prefixes are recomputed.
_SHORTEST_COPY = 32
_COPIED_PART = 16


@dataclass(frozen=True)
class Placement:
    """The slot of a prompt and its cached prefix."""

    slot: int
    source: int  # the slot that has, or will have, the prefix; may be `slot` itself
    cached: int  # tokens of the prefix


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

    def cached(self, slot: int) -> int:
        """Tokens that another sequence can reuse."""
        return self._cached[slot]

    def usable(self, slot: int, length: int) -> int:
        """The longest prefix of at most so many tokens of a slot that a text can go on from."""
        length -= length % self._info.chunk
        return length if self._info.usable is None else self._info.usable(slot, length)

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
        shortest = _SHORTEST_COPY
        if self._info.memory is None:
            shortest = max(shortest, self._info.max_length // _COPIED_PART)
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
        return self._tokens[slot, :end]

    def restored(self, slot: int, end: int) -> None:
        """Record that the first tokens of a prompt that `begin` was given came from a file."""
        self._cached[slot] = end

    def wrote(self, row: Row, *, of_prompt: bool) -> None:
        """Record a computed row."""
        self._touch(row.slot)
        slot, start, end = row.slot, row.position, row.position + len(row.tokens)
        self._tokens[slot, start:end] = row.tokens
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
        for target in targets:
            self._touch(target)

    def _prefixes(
        self, prompt: NDArray[np.int32], adapter: int, ahead: Collection[int]
    ) -> Iterator[tuple[int, int]]:
        """Slots with a prefix of a prompt, and the prefix's usable length."""
        if not self._share or not len(prompt):
            return
        for slot, by in enumerate(self._adapter):
            there = self._planned[slot] if slot in ahead else self._cached[slot]
            length = min(len(prompt), there)
            if by != adapter or not length or self._tokens[slot, 0] != prompt[0]:
                continue
            differing = np.flatnonzero(self._tokens[slot, :length] != prompt[:length])
            length = self.usable(slot, int(differing[0]) if len(differing) else length)
            if length:
                yield slot, length

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock


class GroupMemory:
    """The memory of groups, in blocks of a pool that has fewer than all slots could take."""

    def __init__(self, pool: BlockPool, max_length: int, drafted: int | None) -> None:
        """`max_length`: of a sequence; `drafted`: most tokens that a step adds besides one; None: a
        group cannot be preempted, and so needs all its memory at once."""
        self._pool, self._max_length, self._drafted = pool, max_length, drafted

    def lacks(self, running: Sequence[SequenceGroup]) -> bool:
        """True if the running groups need more blocks for their next tokens than are free."""
        return self._needed(running) > self._pool.free

    def fits(
        self, group: SequenceGroup, place: Placement, running: Sequence[SequenceGroup]
    ) -> bool:
        """True if there is memory for a group, of whose text `place` has a part, and for those that
        run to grow; always if none does."""
        pool, (_, length) = self._pool, self._span(group)
        prompt, sequences = len(group.request.prompt), len(group.in_use())
        used = pool.blocks_of(length, sequences, prompt) - pool.shared(place.cached)
        used += self._needed(running)
        taken = [slot for one in running for slot in one.slots_in_use()]
        held = [(slot, self._max_length) for slot in taken]
        used += pool.held([*held, (place.source, place.cached)]) + len(taken)
        return not running or used <= pool.blocks

    def _needed(self, running: Sequence[SequenceGroup]) -> int:
        """Free blocks that the running groups need to decode their next tokens."""
        pool, later = self._pool, 0
        parts: list[Part] = []
        for group in running:
            start, end = self._span(group)
            prompt, filling = len(group.request.prompt), group.filling[:1]
            for slot in group.slots_in_use():
                if slot in filling:
                    parts.append((slot, group.prefilled, end))
                elif pool.empty(slot):  # it will have the prompt from another one
                    later += pool.blocks_of(end) - pool.shared(prompt)
                else:
                    parts.append((slot, start, end))
            if group.source is not None:
                later -= pool.shared(group.cached)
        return pool.needed(parts) + later

    def _span(self, group: SequenceGroup) -> tuple[int, int]:
        """Tokens of each of a group's sequences that are cached once it decodes, and those that
        memory is needed for."""
        prompt = len(group.request.prompt)
        new = max((len(tokens) for _, tokens in group.strategy.tokens()), default=0)
        most = group.request.options.max_sequence(prompt, self._max_length)
        if self._drafted is not None:
            most = min(most, prompt + new + self._drafted)
        return max(prompt, prompt + new - 1), most
