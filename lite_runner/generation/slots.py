"""What the cache slots of a backend hold: texts, whose beginnings others may go on from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import BackendInfo, Row

# Copying a slot takes as long as computing some part of what it can hold: what is shorter is
# computed again.
_SHORTEST_COPY = 32
_COPIED_PART = 16


@dataclass(frozen=True)
class Place:
    """Where a prompt is computed, and what of it is there already."""

    slot: int
    source: int  # the slot that has, or will have, the beginning of the prompt; `slot`: itself
    cached: int  # tokens of that beginning


class Slots:
    """The tokens in each slot, the adapter that they were computed by, and when that was."""

    def __init__(self, info: BackendInfo, *, prefix_cache: bool) -> None:
        self._info, self._share = info, prefix_cache and info.can_continue
        # Pages of it exist only once they are written.
        self._tokens = np.zeros((info.slots, info.max_length), np.int32)
        self._held = [0] * info.slots  # tokens that another text can go on from
        self._planned = [0] * info.slots  # the same once the prompt there is computed
        self._adapter = [-1] * info.slots
        self._used = [0] * info.slots
        self._clock = 0

    def held(self, slot: int) -> int:
        """Tokens that another text can go on from."""
        return self._held[slot]

    def complete(self, slot: int) -> bool:
        """Whether no more of a prompt is about to come."""
        return self._held[slot] >= self._planned[slot]

    def oldest(self, free: Sequence[int]) -> list[int]:
        """Free slots, the least recently used first."""
        return sorted(free, key=lambda slot: (self._used[slot], slot))

    def place(
        self,
        prompt: NDArray[np.int32],
        adapter: int,
        free: Sequence[int],
        ahead: Collection[int] = (),
    ) -> Place:
        """One of the `free` slots for a prompt, and the longest beginning of it in any slot: of
        those `ahead`, one that is still to be computed too.

        The prompt's last token is always left to compute, since the logits after it are wanted.
        """
        oldest = self.oldest(free)
        best, order = Place(oldest[0], oldest[0], 0), (0, False, 0)
        shortest = max(_SHORTEST_COPY, self._info.max_length // _COPIED_PART)
        for slot, length in self._beginnings(prompt[:-1], adapter, ahead):
            others = [one for one in oldest if one != slot]
            can_copy = self._info.can_copy and length >= shortest and bool(others)
            # A free slot is gone on in, unless that would lose more than it saves.
            stays = slot in free and not (can_copy and 2 * length < self._held[slot])
            if not (stays or can_copy):
                continue
            ready = min(length, self._held[slot])
            if (length, stays, ready) > order:
                best = Place(slot if stays else others[0], slot, length)
                order = (length, stays, ready)
        return best

    def begin(self, slot: int, prompt: NDArray[np.int32], adapter: int) -> None:
        """A prompt is to be computed in a slot, behind the tokens of it that `cut` leaves."""
        self._touch(slot)
        self._tokens[slot, : len(prompt)] = prompt
        self._planned[slot], self._adapter[slot] = len(prompt), adapter

    def cut(self, slot: int, length: int) -> None:
        """Only the first tokens of a slot count from now on."""
        self._held[slot] = self._planned[slot] = min(self._held[slot], length)

    def give_up(self, slot: int) -> None:
        """What is not computed yet of a prompt will not be."""
        self._planned[slot] = self._held[slot]

    def wrote(self, row: Row, *, of_prompt: bool) -> None:
        """A row was computed."""
        self._touch(row.slot)
        slot, start, end = row.slot, row.position, row.position + len(row.tokens)
        self._tokens[slot, start:end] = row.tokens
        held = min(self._held[slot], start)
        # Where the cut of a text shows in its logits, a prompt goes on from a prompt's alone.
        if held == start and (of_prompt or self._info.exact):
            held = end
        self._held[slot] = held
        if not of_prompt:
            self._planned[slot] = held

    def copied(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slots targets[i] are now what sources[i] were."""
        for array in (self._held, self._planned, self._adapter):
            for target, value in zip(targets, [array[one] for one in sources], strict=True):
                array[target] = value
        self._tokens[list(targets)] = self._tokens[list(sources)]
        for target in targets:
            self._touch(target)

    def _beginnings(
        self, prompt: NDArray[np.int32], adapter: int, ahead: Collection[int]
    ) -> Iterator[tuple[int, int]]:
        """Slots with a beginning of a prompt, and its length, which the backend can go on from."""
        if not self._share or not len(prompt):
            return
        for slot, by in enumerate(self._adapter):
            there = self._planned[slot] if slot in ahead else self._held[slot]
            length = min(len(prompt), there)
            if by != adapter or not length or self._tokens[slot, 0] != prompt[0]:
                continue
            differing = np.flatnonzero(self._tokens[slot, :length] != prompt[:length])
            length = int(differing[0]) if len(differing) else length
            length -= length % self._info.chunk
            if length:
                yield slot, length

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
