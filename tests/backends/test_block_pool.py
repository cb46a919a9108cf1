"""The pool of blocks beside slots that have their own tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lite_runner.backends.block_pool import BlockPool, Part

SLOTS, LENGTH, BLOCK, STEP = 4, 20, 4, 4


class Texts:
    """Slots whose tokens are in blocks, and in lists beside them."""

    def __init__(self, blocks: int | None, ahead: int, window: int) -> None:
        self.pool = BlockPool(SLOTS, LENGTH, BLOCK, blocks, ahead, window=window, step=STEP)
        self.ahead, self.texts = ahead, [list[int]() for _ in range(SLOTS)]
        self.numbers = [[-1] * BLOCK for _ in range(self.pool.size)]
        for place in range(ahead):
            self.numbers[self.pool.front[place // BLOCK]][place % BLOCK] = -2 - place

    def write(self, slot: int, start: int, end: int, first: int) -> None:
        """Tokens from `first` on, where there are free blocks. With a window there always are,
        unless what the tokens see was given back."""
        windowed = bool(self.pool.window)
        if windowed:
            del self.texts[slot][start:]
            end = min(end, start + STEP)
        part = slot, start, end
        if self.pool.usable(slot, start) < start:
            with pytest.raises(ValueError, match="blocks that it attends to were freed"):
                self.pool.write(*part, self.copy)
            self.release(slot, 0)
            return
        needed, free = self.pool.needed([part]), self.pool.free
        if needed > free and not windowed:
            with pytest.raises(ValueError, match="no block is free"):
                self.pool.write(*part, self.copy)
            self.release(slot, start)  # as whoever makes room for it
            return
        self.pool.write(*part, self.copy)
        assert self.pool.writable(*part)
        assert self.pool.free == free - needed or windowed
        tokens = list(range(first, first + end - start))
        self.texts[slot][start:] = tokens
        for place, token in enumerate(tokens, self.ahead + start):
            self.numbers[self.pool.tables[slot, place // BLOCK]][place % BLOCK] = token

    def copy(self, source: int, target: int) -> None:
        self.numbers[target] = list(self.numbers[source])

    def fork(self, sources: list[int], targets: list[int]) -> None:
        free = self.pool.free
        self.pool.fork(sources, targets)
        assert self.pool.free >= free  # no block is taken
        taken = [list(self.texts[source]) for source in sources]
        for target, text in zip(targets, taken, strict=True):
            self.texts[target] = text

    def release(self, slot: int, length: int) -> None:
        self.pool.release(slot, length)
        del self.texts[slot][length:]

    def check(self) -> None:
        """Slots have their tokens, and blocks as many users as there are."""
        pool, users = self.pool, Counter(self.pool.front)
        visible = set[int]()
        for slot, text in enumerate(self.texts):
            held = [int(one) for one in pool.tables[slot] if one >= 0]
            first = pool._held[slot].count(-1)  # those before were given back
            assert list(pool.tables[slot][first : first + len(held)]) == held
            assert len(set(held)) == len(held) and (pool.window or not first or not held)
            users.update(held)
            numbers = [number for block in held for number in self.numbers[block]]
            there = ([-2 - place for place in range(self.ahead)] + text)[first * BLOCK :]
            assert numbers[: len(there)] == there
            for length in range(1, len(text) + 1):
                seen = max(0, length + 1 - pool.window) if pool.window else 0
                assert pool.usable(slot, length) == (length if seen // BLOCK >= first else 0)
            visible |= set(pool.tables[slot][pool._seen[slot] // BLOCK :].tolist()) - {-1}
        assert {block: count for block, count in enumerate(pool._users) if count} == dict(users)
        assert sorted(pool._free) == [one for one in range(pool.size) if not users[one]]
        every = pool.held((slot, LENGTH) for slot in range(SLOTS))
        assert every == len(visible - set(pool.front))
        assert pool.blocks - pool.free == len(set(users) - set(pool.front))
        assert pool.window or every == pool.blocks - pool.free


@settings(max_examples=200)
@given(
    st.data(),
    st.one_of(
        st.tuples(st.sampled_from([None, 6, 9, 14]), st.sampled_from([0, 0, 3, 4, 6]), st.just(0)),
        st.tuples(st.none(), st.just(0), st.integers(1, 8)),
    ),
)
def test_slots_have_their_own_tokens(data: Any, sizes: tuple[int | None, int, int]) -> None:
    """Whoever shares blocks with whom; no block is lost, or two slots' that both write to it."""
    texts, slots = Texts(*sizes), st.integers(0, SLOTS - 1)
    for step in range(data.draw(st.integers(1, 25))):
        slot = data.draw(slots)
        length = len(texts.texts[slot])
        match data.draw(st.sampled_from(["write", "write", "fork", "release"])):
            case "write":
                start = data.draw(st.integers(max(0, length - 3), min(length, LENGTH - 1)))
                end = data.draw(st.integers(start + 1, LENGTH))
                texts.write(slot, start, end, 100 * step)
            case "fork":
                targets = data.draw(st.lists(slots, min_size=1, unique=True))
                texts.fork([data.draw(slots) for _ in targets], targets)
            case "release":
                texts.release(slot, data.draw(st.integers(0, length)))
        texts.check()
    parts: list[Part] = [
        (slot, len(text), min(LENGTH, len(text) + data.draw(st.integers(0, 9))))
        for slot, text in enumerate(texts.texts)
    ]
    if not texts.pool.window and (needed := texts.pool.needed(parts)) <= (free := texts.pool.free):
        for slot, start, end in parts:
            texts.pool.write(slot, start, end, texts.copy)
        assert texts.pool.free == free - needed
    for slot in range(SLOTS):
        texts.release(slot, 0)
    assert texts.pool.free == texts.pool.blocks and all(map(texts.pool.empty, range(SLOTS)))


def test_the_memory_that_slots_share() -> None:
    pool = BlockPool(8, 2048, 128)
    assert (pool.blocks, pool.scarce, BlockPool(8, 2048, 128, 100).scarce) == (128, False, True)
    assert BlockPool(8, 2048, 128, 3).blocks == 16  # a slot at full length
    pool.write(0, 0, 2000, lambda *_: None)
    pool.fork([0] * 7, list(range(1, 8)))
    copies: list[tuple[int, int]] = []
    for slot in range(8):
        pool.write(slot, 2000, 2010, lambda *pair: copies.append(pair))
    # 2,000 tokens are 15 full blocks and one that each has by itself, the last one without a copy.
    assert pool.blocks - pool.free == 15 + 8 == pool.blocks_of(2010, 8, 2000) and len(copies) == 7


def test_a_slot_with_a_window_begins_anew_before_it_is_released() -> None:
    pool = BlockPool(1, LENGTH, BLOCK, window=5, step=STEP)
    for start in [*range(0, LENGTH, STEP), *range(0, LENGTH, STEP)]:
        pool.write(0, start, start + STEP, lambda *_: None)
    assert pool.blocks == 3 and pool.usable(0, LENGTH) == LENGTH and not pool.usable(0, 8)


def test_tokens_are_written_again_from_as_far_back_as_a_step_reaches() -> None:
    """One at a time, and refused; or in the parts of a step that failed in its last one."""
    window, step = 13, 2 * BLOCK
    pool = BlockPool(1, 200, BLOCK, window=window, step=step)
    for start in range(200 - step):
        for place in range(start, start + step):
            pool.reserve([(0, place, place + 1)], lambda *_: None)
        assert pool.usable(0, start) == start
    gone = (
        0,
        BLOCK,
        BLOCK + 1,
    )  # the error is the pool's, though the slot alone has the token's block
    pool.release(0, 100)
    assert not pool.writable(*gone)
    with pytest.raises(
        ValueError, match="slot 0: got token 4, but the blocks that it attends to were freed"
    ):
        pool.reserve([gone], lambda *_: None)


def test_reserve_tells_if_blocks_were_given() -> None:
    pool = BlockPool(1, LENGTH, BLOCK)
    first, second = (0, 0, BLOCK), (0, BLOCK, BLOCK + 1)
    assert pool.reserve([first], lambda *_: None)
    assert not pool.reserve([first], lambda *_: None)
    assert pool.reserve([first, second], lambda *_: None)
