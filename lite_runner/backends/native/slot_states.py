"""Recurrent states of the cache slots, which cannot be cut to a prefix as keys can.

A state stands behind the last token of its slot. Snapshots of it are kept after some earlier
tokens, from which a text with the same prefix continues. Where a row begins at any other token (a
step that was interrupted and is repeated, drafts that were refused), its state is computed again
from the snapshot before it: the tokens of each slot are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import Row

SPACING = 128  # tokens: snapshots are behind multiples of it
SNAPSHOTS = 4  # of a slot, at most
_UNKNOWN = -1  # where a state stands while it is written


class SlotStates:
    """The state of each slot, and its snapshots."""

    def __init__(self, states: NDArray[np.float32], length: int) -> None:
        """`states` [slots, numbers]: which a step changes; `length`: tokens of a slot."""
        self._states = states
        slots = len(states)
        self._tokens = np.zeros((slots, length), np.int32)
        self._end = [0] * slots
        # By the number of tokens before. Snapshots never change, so that slots share them.
        self._kept: list[dict[int, NDArray[np.float32]]] = [{} for _ in range(slots)]

    def usable(self, slot: int, length: int) -> int:
        """The longest prefix of at most `length` tokens that a row can go on from."""
        return max(end for end in (0, self._end[slot], *self._kept[slot]) if end <= length)

    def seek(self, rows: Sequence[Row]) -> list[Row]:
        """Set the states to where the rows begin. Returns rows to compute first, for states without
        a snapshot there."""
        return [before for row in rows if (before := self._seek(row)) is not None]

    def _seek(self, row: Row) -> Row | None:
        slot, start, kept = row.slot, row.position, self._kept[row.slot]
        for end in [end for end in kept if end > start]:
            del kept[end]
        before = None
        if self._end[slot] != start:
            self._end[slot] = _UNKNOWN
            found = max((0, *kept))
            self._states[slot] = kept[found] if found else 0.0
            self._end[slot] = found
            if found < start:
                again = self._tokens[slot, found:start].copy()
                before = Row(slot, again, found, row.adapter_slot, logits=0)
        self._tokens[slot, start : start + len(row.tokens)] = row.tokens
        return before

    @staticmethod
    def stops(rows: Sequence[Row]) -> Iterator[int]:
        """Indices in the rows' tokens, concatenated, after which a snapshot may be kept."""
        first = 0
        for row in rows:
            end = row.position + len(row.tokens)
            for place in range(row.position // SPACING * SPACING + SPACING, end, SPACING):
                yield first + place - row.position
            first += len(row.tokens)

    def begin(self, slots: Sequence[int]) -> None:
        """A step is about to change the states of some slots."""
        for slot in slots:
            self._end[slot] = _UNKNOWN

    def ended(self, slots: Sequence[int], ends: Sequence[int]) -> None:
        """A step has changed the states; they are after these tokens."""
        for slot, end in zip(slots, ends, strict=True):
            self._end[slot] = end
            if end % SPACING == 0:
                self._keep(slot, end)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Record copied slots."""
        self._tokens[list(targets)] = self._tokens[list(sources)]
        ends = [self._end[source] for source in sources]
        kept = [dict(self._kept[source]) for source in sources]
        for target, end, own in zip(targets, ends, kept, strict=True):
            self._end[target], self._kept[target] = end, own

    def release(self, slot: int, length: int) -> None:
        """Forget the state of a slot beyond `length` tokens."""
        for end in [end for end in self._kept[slot] if end > length]:
            del self._kept[slot][end]
        if self._end[slot] > length:
            self._end[slot] = _UNKNOWN

    def _keep(self, slot: int, end: int) -> None:
        """Take a snapshot; drop those with the nearest neighbours if there are too many, so that
        the rest is spread over the text."""
        kept = self._kept[slot]
        kept[end] = self._states[slot].copy()
        if len(kept) > SNAPSHOTS:
            places = [0, *sorted(kept)]
            gaps = zip(places, places[1:], places[2:], strict=False)
            del kept[min((behind - before, place) for before, place, behind in gaps)[1]]
