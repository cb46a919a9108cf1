"""The blocks of a KV cache, and the table of those of each slot.

Slots whose texts begin alike have the same blocks. A block that several slots have is copied when
one of them writes to it, as vLLM's was at first: Kwon et al., Efficient Memory Management for Large
Language Model Serving with PagedAttention (2023).

Layers with a sliding window have a pool of their own, as llama.cpp's have a cache: a slot needs the
blocks of its last tokens there. Those before stay, for other texts with that prefix, until no block
is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lite_runner.system.signals import deferred

Part = tuple[int, int, int]  # a slot, and its tokens from the second number to before the third


class BlockPool:
    """Blocks of `block` tokens, of which slots take some as they grow."""

    def __init__(
        self,
        slots: int,
        length: int,
        block: int,
        blocks: int | None = None,
        ahead: int = 0,
        *,
        window: int = 0,
        step: int = 0,
        block_bytes: int = 1,
    ) -> None:
        """`length`: most tokens of a slot; `blocks`: those that there is memory for (None: enough
        for all slots at full length; a slot at full length always fits); `ahead`: positions in
        front of the tokens, the same in all slots. `window`: tokens that one sees, itself
        included; what the last `step` see stays, so that these are written at once, or again; a
        slot has no more blocks than that takes if others need them; 0: all before it."""
        self.block, self._ahead, self.window, self._step = block, ahead, window, step
        self.block_bytes = block_bytes
        self.front = list(range(-(-ahead // block)))  # blocks of the positions ahead
        one = self.blocks_of(length)
        if window:
            one = min(one, window_blocks(window, step, block))
        most = self.blocks = slots * one
        if blocks is not None:
            self.blocks = max(one, min(most, blocks - len(self.front)))
        self.scarce = self.blocks < most  # slots may need more
        self.size = self.blocks + len(self.front)
        # Of each chunk of a slot's positions, for the kernels; -1: none.
        self.tables = np.full((slots, max(1, -(-(ahead + length) // block))), -1, np.int32)
        self._held: list[list[int]] = [[] for _ in range(slots)]  # -1: given back
        self._seen = [0] * slots  # the first token that the last `step` see
        self._users = [1] * len(self.front) + [0] * self.blocks + [0]  # the last: of no block
        self._free = list(range(self.size - 1, len(self.front) - 1, -1))
        for slot in range(slots):
            self._give(slot, self.front)

    @property
    def free(self) -> int:
        """Blocks that no slot has."""
        return len(self._free)

    def blocks_of(self, length: int, slots: int = 1, prompt: int = 0) -> int:
        """Blocks of slots with so many tokens each, of which those of the `prompt` are the same."""
        one = -(-(self._ahead + length) // self.block) - self._ahead // self.block
        return slots * one - (slots - 1) * self.shared(prompt)

    def shared(self, length: int) -> int:
        """Blocks that slots with the same first tokens share: the full ones."""
        return (self._ahead + length) // self.block - self._ahead // self.block

    def held(self, parts: Iterable[tuple[int, int]]) -> int:
        """Blocks that slots have of their first tokens, (slot, tokens), each counted once; without
        those that only other texts could use."""
        found: set[int] = set()
        for slot, length in parts:
            found.update(self._held[slot][self._seen[slot] // self.block : self._end(length)])
        return len(found.difference(self.front, [-1]))

    def empty(self, slot: int) -> bool:
        """True if a slot has no blocks of tokens."""
        return self._held[slot] == self.front

    def usable(self, slot: int, length: int) -> int:
        """Usable first tokens of a slot; 0 if blocks that the next one attends to were freed."""
        if not self.window:
            return length
        first = max(0, length + 1 - self.window) // self.block
        return 0 if -1 in self._held[slot][first : self._end(length)] else length

    def needed(self, parts: Iterable[Part]) -> int:
        """Free blocks that writing to all of these parts takes."""
        new, writers = 0, dict[int, int]()
        for slot, start, end in parts:
            held, last = self._held[slot], self._end(end)
            new += max(0, last - len(held))
            for block in held[(self._ahead + start) // self.block : last]:
                writers[block] = writers.get(block, 0) + 1
        # The last of those that have a block need not copy it.
        return new + sum(min(count, self._users[block] - 1) for block, count in writers.items())

    def reserve(self, parts: Sequence[Part], copy: Callable[[int, int], None]) -> bool:
        """`write` all parts, and return True, if any is not `writable`; a signal waits until tables
        and blocks agree."""
        if all(self.writable(*part) for part in parts):
            return False
        with deferred():
            for part in parts:
                self.write(*part, copy)
        return True

    def writable(self, slot: int, start: int, end: int) -> bool:
        """True if a slot alone has the blocks of these tokens, and of those they attend to."""
        held, last = self._held[slot], self._end(end)
        if last > len(held) or self.usable(slot, start) < start:
            return False
        return all(
            self._users[one] == 1 for one in held[(self._ahead + start) // self.block : last]
        )

    def write(self, slot: int, start: int, end: int, copy: Callable[[int, int], None]) -> None:
        """Give a slot blocks of its own for tokens that are about to be written; what was behind
        them is lost. `copy` copies the first block to the second. Raises ValueError without a
        free block."""
        held, first = self._held[slot], (self._ahead + start) // self.block
        if self.window:
            if self.usable(slot, start) < start:
                raise ValueError(
                    f"slot {slot}: got token {start}, but the blocks that it attends to were freed"
                )
            self.release(slot, end)  # otherwise there might be too many
            held = self._held[slot]
            self._seen[slot] = max(0, min(start, end - self._step) + 1 - self.window)
        for index in range(min(first, len(held)), self._end(end)):
            if index < len(held) and self._users[held[index]] == 1:
                continue
            if not self._free:
                self._free_blocks()
            if not self._free:
                raise ValueError(f"slot {slot}: got token {end - 1}, but no block is free")
            block = self._free.pop()
            self._users[block] = 1
            if index == len(held):
                held.append(block)
            else:
                if index * self.block < self._ahead + start:
                    copy(held[index], block)
                self._leave(held[index : index + 1])
                held[index] = block
            self.tables[slot, index] = block

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give slot targets[i] the blocks of sources[i]; all are read before any is changed."""
        taken = [(list(self._held[source]), self._seen[source]) for source in sources]
        before = [self._held[target] for target in targets]
        for target, (blocks, seen) in zip(targets, taken, strict=True):
            self._give(target, blocks)
            self._seen[target] = seen
        for blocks in before:  # once those that both have are counted
            self._leave(blocks)

    def release(self, slot: int, length: int) -> None:
        """Free a slot's blocks after its first `length` tokens."""
        held = self._held[slot]
        self._give(slot, held[: self._end(length)] if length else self.front)
        self._leave(held)
        self._seen[slot] = max(0, min(self._seen[slot], length + 1 - self.window))

    def _free_blocks(self) -> None:
        """Free blocks of tokens that are before a slot's window: of the slot with the most."""

        def passed(slot: int) -> list[int]:
            return self._held[slot][: self._seen[slot] // self.block]

        slots = range(len(self._held))
        for slot in sorted(slots, key=lambda one: passed(one).count(-1) - len(passed(one))):
            blocks = passed(slot)
            self._held[slot][: len(blocks)] = [-1] * len(blocks)
            self.tables[slot, : len(blocks)] = -1
            self._leave(blocks)
            if self._free:
                return

    def _give(self, slot: int, blocks: Sequence[int]) -> None:
        """Let a slot have these blocks; it has not left those before."""
        for block in blocks:
            self._users[block] += block >= 0
        self._held[slot] = list(blocks)
        self.tables[slot, : len(blocks)] = blocks
        self.tables[slot, len(blocks) :] = -1

    def _leave(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block < 0:
                continue
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def _end(self, length: int) -> int:
        """Chunks of the first tokens, and of the positions ahead."""
        return -(-(self._ahead + length) // self.block)


def window_blocks(window: int, step: int, block: int) -> int:
    """Most blocks that `step` tokens attend to and that are written at once."""
    return 1 + (window + step + block - 3) // block
