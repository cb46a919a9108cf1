"""Recurrent states of the cache slots, which cannot be cut to a prefix as keys can.

A state is that after the last token of its slot. Snapshots of it are kept after some earlier
tokens, from which a text with the same prefix continues, and another one in front of tokens that
may be taken back (drafts). Where a row begins at any other token (drafts that were refused, a step
that was interrupted and is repeated), it begins at the snapshot before it instead: the tokens of
each slot are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import Row

SPACING = 128  # tokens: snapshots are behind multiples of it
SNAPSHOTS = 4  # of a slot, at most
_UNKNOWN = -1  # position of a state that is being written


class SlotStates:
    """The state of each slot, and its snapshots."""

    def __init__(
        self, states: NDArray[np.float32], before_drafts: NDArray[np.float32], length: int
    ) -> None:
        """`states` and `before_drafts` [slots, numbers]: which a step changes; `length`: tokens of
        a slot."""
        self._states, self._before_drafts = states, before_drafts
        slots = len(states)
        self._tokens = np.zeros((slots, length), np.int32)
        self._end = [0] * slots
        self._drafts = [_UNKNOWN] * slots  # position of the state before drafts
        # By the number of tokens before. Snapshots never change, so that slots share them.
        self._kept: list[dict[int, NDArray[np.float32]]] = [{} for _ in range(slots)]

    def usable(self, slot: int, length: int) -> int:
        """The longest prefix of at most `length` tokens that a row can go on from."""
        ends = (0, self._end[slot], *self._snapshots(slot))
        return max(end for end in ends if end <= length)

    def seek(self, rows: Sequence[Row]) -> list[Row]:
        """Set the states to where the rows begin. Returns the rows, of which some begin earlier,
        where there is a state to go on from."""
        return [self._seek(row) for row in rows]

    def _seek(self, row: Row) -> Row:
        slot, start = row.slot, row.position
        self._forget(slot, start)
        if self._end[slot] != start:
            self._end[slot] = _UNKNOWN
            snapshots = self._snapshots(slot)
            found = max((0, *snapshots))
            self._states[slot] = snapshots[found] if found else 0.0
            self._end[slot] = found
            again = self._tokens[slot, found:start]
            row = replace(row, tokens=np.concatenate([again, row.tokens]), position=found)
        self._tokens[slot, row.position : row.position + len(row.tokens)] = row.tokens
        return row

    @staticmethod
    def stops(rows: Sequence[Row]) -> Iterator[int]:
        """Indices in the rows' tokens, concatenated, after which a snapshot may be kept."""
        first = 0
        for row in rows:
            end = row.position + len(row.tokens)
            for place in range(row.position // SPACING * SPACING + SPACING, end, SPACING):
                yield first + place - row.position
            first += len(row.tokens)

    @contextmanager
    def changed(self, ends: Mapping[int, int], drafts: Mapping[int, int]) -> Iterator[None]:
        """The context of a step, which changes the states of slots: they are after so many tokens
        then, and those before drafts after so many."""
        for slot in ends:
            self._end[slot] = _UNKNOWN
        for slot in drafts:
            self._drafts[slot] = _UNKNOWN
        yield
        for slot, end in ends.items():
            self._end[slot] = end
            if end % SPACING == 0:
                self._keep(slot, end)
        for slot, end in drafts.items():
            self._drafts[slot] = end

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots, by snapshots they share."""
        self._states[list(targets)] = self._states[list(sources)]
        self._tokens[list(targets)] = self._tokens[list(sources)]
        ends = [self._end[source] for source in sources]
        kept = [dict(self._kept[source]) for source in sources]
        for target, end, own in zip(targets, ends, kept, strict=True):
            self._end[target], self._kept[target] = end, own
            self._drafts[target] = _UNKNOWN

    def release(self, slot: int, length: int) -> None:
        """Forget the state of a slot beyond `length` tokens."""
        self._forget(slot, length)
        if self._end[slot] > length:
            self._end[slot] = _UNKNOWN

    def _snapshots(self, slot: int) -> dict[int, NDArray[np.float32]]:
        """All of a slot, by the number of tokens before."""
        if (drafts := self._drafts[slot]) == _UNKNOWN:
            return self._kept[slot]
        return {**self._kept[slot], drafts: self._before_drafts[slot]}

    def _forget(self, slot: int, length: int) -> None:
        """Forget the snapshots beyond `length` tokens."""
        for end in [end for end in self._kept[slot] if end > length]:
            del self._kept[slot][end]
        if self._drafts[slot] > length:
            self._drafts[slot] = _UNKNOWN

    def _keep(self, slot: int, end: int) -> None:
        """Take a snapshot; drop those with the nearest neighbours if there are too many, so that
        the rest is spread over the text."""
        kept = self._kept[slot]
        kept[end] = self._states[slot].copy()
        if len(kept) > SNAPSHOTS:
            places = [0, *sorted(kept)]
            gaps = zip(places, places[1:], places[2:], strict=False)
            del kept[min((behind - before, place) for before, place, behind in gaps)[1]]
