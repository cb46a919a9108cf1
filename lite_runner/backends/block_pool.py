"""The blocks of a KV cache, and the table of those of each slot.

Slots whose texts begin alike have the same blocks. A block that several slots have is copied when
one of them writes to it, as vLLM's was at first: Kwon et al., Efficient Memory Management for Large
Language Model Serving with PagedAttention (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lite_runner.system.signals import deferred

Part = tuple[int, int, int]  # a slot, and its tokens from the second number to before the third


class BlockPool:
    """Blocks of `block` tokens, of which slots take some as they grow."""

    def __init__(
        self, slots: int, length: int, block: int, blocks: int | None = None, ahead: int = 0
    ) -> None:
        """`length`: most tokens of a slot; `blocks`: those that there is memory for (None: enough
        for all slots at full length; a slot at full length always fits); `ahead`: positions in
        front of the tokens, the same in all slots."""
        self.block, self._ahead = block, ahead
        self.front = list(range(-(-ahead // block)))  # blocks of the positions ahead
        one = self.blocks_of(length)
        most = self.blocks = slots * one
        if blocks is not None:
            self.blocks = max(one, min(most, blocks - len(self.front)))
        self.scarce = self.blocks < most  # slots may need more
        self.size = self.blocks + len(self.front)
        # Of each chunk of a slot's positions, for the kernels; -1: none.
        self.tables = np.full((slots, max(1, -(-(ahead + length) // block))), -1, np.int32)
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._users = [1] * len(self.front) + [0] * self.blocks
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
        """Blocks that slots have of their first tokens, (slot, tokens), each counted once."""
        found: set[int] = set()
        for slot, length in parts:
            found.update(self._held[slot][: self._end(length)])
        return len(found.difference(self.front))

    def empty(self, slot: int) -> bool:
        """True if a slot has no blocks of tokens."""
        return self._held[slot] == self.front

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

    def reserve(self, parts: Sequence[Part], copy: Callable[[int, int], None]) -> None:
        """`write` all parts, if any is not `writable`; a signal waits until tables and blocks
        agree."""
        if all(self.writable(*part) for part in parts):
            return
        with deferred():
            for part in parts:
                self.write(*part, copy)

    def writable(self, slot: int, start: int, end: int) -> bool:
        """True if a slot alone has the blocks of these tokens."""
        held, last = self._held[slot], self._end(end)
        if last > len(held):
            return False
        return all(
            self._users[one] == 1 for one in held[(self._ahead + start) // self.block : last]
        )

    def write(self, slot: int, start: int, end: int, copy: Callable[[int, int], None]) -> None:
        """Give a slot blocks of its own for tokens that are about to be written; what was behind
        them is lost. `copy` copies the first block to the second. Raises ValueError without a
        free block."""
        held, first = self._held[slot], (self._ahead + start) // self.block
        for index in range(min(first, len(held)), self._end(end)):
            if index < len(held) and self._users[held[index]] == 1:
                continue
            if not self._free:
                raise ValueError(f"slot {slot}: got token {end - 1}, but no block is free")
            block = self._free.pop()
            self._users[block] = 1
            if index == len(held):
                held.append(block)
            else:
                if index * self.block < self._ahead + start:
                    copy(held[index], block)
                self._users[held[index]] -= 1
                held[index] = block
            self.tables[slot, index] = block

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give slot targets[i] the blocks of sources[i]; all are read before any is changed."""
        taken = [list(self._held[source]) for source in sources]
        before = [self._held[target] for target in targets]
        for target, blocks in zip(targets, taken, strict=True):
            self._give(target, blocks)
        for blocks in before:  # once those that both have are counted
            self._leave(blocks)

    def release(self, slot: int, length: int) -> None:
        """Take a slot's blocks behind its first tokens."""
        held = self._held[slot]
        self._give(slot, held[: self._end(length)] if length else self.front)
        self._leave(held)

    def _give(self, slot: int, blocks: Sequence[int]) -> None:
        """Let a slot have these blocks; it has not left those before."""
        for block in blocks:
            self._users[block] += 1
        self._held[slot] = list(blocks)
        self.tables[slot, : len(blocks)] = blocks
        self.tables[slot, len(blocks) :] = -1

    def _leave(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def _end(self, length: int) -> int:
        """Chunks of the first tokens, and of the positions ahead."""
        return -(-(self._ahead + length) // self.block)
