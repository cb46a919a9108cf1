"""Recurrent states of cache slots, where a state is the sum of a slot's tokens."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends import Row
from lite_runner.backends.native import slot_states
from lite_runner.backends.native.slot_states import SNAPSHOTS, SlotStates

LENGTH = 100


@pytest.fixture(autouse=True)
def spacing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_states, "SPACING", 10)


class Sums:
    """Slots whose states are computed as a backend does it."""

    def __init__(self, slots: int = 2) -> None:
        self.numbers, self.before_drafts = np.zeros((2, slots, 1), np.float32)
        self.states = SlotStates(self.numbers, self.before_drafts, LENGTH)
        self.computed = 0  # tokens

    def row(
        self,
        slot: int,
        tokens: NDArray[np.int32],
        position: int,
        *,
        drafts: int = 0,
        ends: bool = True,
    ) -> int:
        """The state behind a row, the last tokens of which are drafts; `ends`: the last step is not
        interrupted."""
        (row,) = self.states.seek([Row(slot, tokens, position, drafts=drafts > 0)])
        stops = [*self.states.stops([row]), len(row.tokens)]
        known = position + len(tokens) - drafts
        for start, stop in zip([0, *stops], stops, strict=False):
            part = row.tokens[start:stop]
            last = row.position + stop
            before = {slot: known} if drafts and last - len(part) < known <= last else {}
            with (
                nullcontext() if stop < len(row.tokens) or ends else pytest.raises(MemoryError),
                self.states.changed({slot: last}, before),
            ):
                if before:
                    own = part[: len(part) - (last - known)]
                    self.before_drafts[slot] = self.numbers[slot] + own.sum()
                self.numbers[slot] += part.sum()
                self.computed += len(part)
                if stop == len(row.tokens) and not ends:
                    raise MemoryError
        return int(self.numbers[slot, 0])


TOKENS = np.random.default_rng(0).integers(1, 50, LENGTH).astype(np.int32)


def test_a_state_goes_on_from_where_it_stands() -> None:
    sums = Sums()
    for start, end in ((0, 7), (7, 30), (30, 31)):
        assert sums.row(0, TOKENS[start:end], start) == TOKENS[:end].sum()
    assert sums.computed == 31
    assert sums.row(0, TOKENS[40:45], 0) == TOKENS[40:45].sum()  # another text


def test_other_positions_are_computed_again_from_a_snapshot() -> None:
    sums = Sums()
    sums.row(0, TOKENS[:38], 0)
    assert [sums.states.usable(0, length) for length in (9, 29, 37, 38, 50)] == [0, 20, 30, 38, 38]
    before = sums.computed
    assert sums.row(0, TOKENS[34:36], 34) == TOKENS[:36].sum()
    assert sums.computed - before == 4 + 2
    assert sums.row(0, TOKENS[90:93], 5) == TOKENS[:5].sum() + TOKENS[90:93].sum()
    assert sums.states.usable(0, 50) == 8  # what was behind is of another text


def test_a_step_that_was_interrupted_is_repeated() -> None:
    sums = Sums()
    sums.row(0, TOKENS[:25], 0)
    sums.row(0, TOKENS[25:27], 25, ends=False)
    assert sums.states.usable(0, 27) == 20
    assert sums.row(0, TOKENS[25:27], 25) == TOKENS[:27].sum()


def test_drafts_are_taken_back() -> None:
    sums = Sums()
    sums.row(0, TOKENS[:12], 0)
    for accepted in (0, 3, 5):  # of 5
        sums.row(0, np.append(TOKENS[12], TOKENS[50:55]), 12, drafts=5)
        taken = [TOKENS[12], *TOKENS[50 : 50 + accepted]]
        before = sums.computed
        expected = TOKENS[:12].sum() + sum(taken) + TOKENS[60]
        assert sums.row(0, TOKENS[60:61], 13 + accepted) == expected
        assert sums.computed - before == 1 + accepted % 5
        assert sums.row(0, TOKENS[10:12], 10) == TOKENS[:12].sum()
    assert sums.row(0, TOKENS[12:18], 12, drafts=5) == TOKENS[:18].sum()
    sums.row(0, TOKENS[60:62], 14, drafts=1, ends=False)  # the state before drafts is not known
    assert sums.states.usable(0, 17) == 10


def test_snapshots_are_spread_over_a_text() -> None:
    sums = Sums()
    sums.row(0, TOKENS, 0)
    kept = sorted({sums.states.usable(0, length) for length in range(LENGTH)} - {0})
    assert len(kept) == SNAPSHOTS - 1  # the last one stands where the state does
    assert all(10 < behind - place <= 40 for place, behind in zip([0, *kept], kept, strict=False))


def test_copies_have_the_snapshots_and_released_slots_none() -> None:
    sums = Sums()
    sums.row(0, TOKENS[:38], 0)
    sums.numbers[1] = sums.numbers[0]
    sums.states.copy([0], [1])
    assert sums.row(1, TOKENS[50:52], 34) == TOKENS[:34].sum() + TOKENS[50:52].sum()
    assert sums.row(0, TOKENS[38:40], 38) == TOKENS[:40].sum()
    sums.states.release(0, 0)
    assert sums.states.usable(0, 40) == 0
    assert sums.row(0, TOKENS[:3], 0) == TOKENS[:3].sum()
