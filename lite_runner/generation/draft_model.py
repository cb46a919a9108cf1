"""Speculative decoding by a draft model, which is smaller and has the same vocabulary, or by the
model's own layer for multi-token prediction.

Either continues the texts of all sequences together, greedily, before the step that verifies what
it drafted. Its own time is a part of that step's. A text that a draft model has not followed must
first be prefilled: that is done only while drafts have saved the time that was spent, up to a small
share.

After Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), where a
token is kept if it is the one that would have been drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import Backend, NextTokens, Paged, Row
from lite_runner.generation.decoding import SequenceGroup
from lite_runner.generation.speculation import MOST_DRAFTED, PromptLookups, StepCost

_FIRST_RATE = 0.7  # of acceptance, before a draft was checked
_WEIGHT = 0.1  # of the newest observation
_FORGOTTEN = 0.01  # of what is known of the rate, in a step without drafts
_CHUNK = 256  # tokens of a text that are prefilled in a step, while other sequences wait
_BEHIND = 2 * MOST_DRAFTED  # tokens that are prefilled whatever that costs


class ModelRate:
    """The acceptance rate of a draft model, over all sequences."""

    rate = _FIRST_RATE

    def checked(self, hit: bool) -> None:
        """Account for a drafted token, which was chosen or not."""
        self.rate += _WEIGHT / 2 * (hit - self.rate)


class DraftedTokens:
    """Tokens that a model has drafted for one sequence, and their rate of acceptance."""

    def __init__(self, every: ModelRate) -> None:
        self._every = every
        self.drafted: list[int] = []
        self.rate = every.rate

    def check(self, tokens: Sequence[int], drafted: int) -> int:
        """Compare the first `drafted` with the tokens that were chosen, and forget all; returns how
        many are the same."""
        checked, self.drafted = self.drafted[:drafted], []
        right = _shared(tokens, checked)
        for hit in [True] * right + [False] * (right < len(checked)):
            self.rate += _WEIGHT * (hit - self.rate)
            self._every.checked(hit)
        if not checked:
            self.rate += _FORGOTTEN * (_FIRST_RATE - self.rate)
        return right


class DraftSequence(DraftedTokens):
    """Drafts for one sequence, by a model. See speculation.Drafter."""

    def __init__(self, model: DraftModel, prompt: NDArray[np.int32]) -> None:
        super().__init__(model)
        self._model = model
        self.text: list[int] = prompt.tolist()
        self.slot: int | None = None
        self.known = 0  # first tokens of the text whose keys are in the slot

    @property
    def behind(self) -> bool:
        """True if the rest of its text takes long to prefill."""
        return len(self.text) - self.known > _BEHIND

    def draft(self, most: int) -> list[int]:
        """See Drafter; None before DraftModel.draft was called."""
        if most > 0 and not self.drafted:
            self._model.asked.append((self, most))
        return self.drafted[: max(0, most)]

    def extend(self, tokens: Sequence[int], drafted: int) -> None:
        followed = len(self.drafted) - 1  # its keys are there, but for the last one's
        right = self.check(tokens, drafted)
        if followed >= 0 and self.known == len(self.text):
            self.known += min(right, followed, len(tokens) - 1)
        self.text += tokens


class NextTokenSequence(DraftedTokens):
    """Drafts for one sequence, by a layer. See speculation.Drafter."""

    def __init__(self, model: NextTokenDrafts) -> None:
        super().__init__(model)
        self._model = model

    def draft(self, most: int) -> list[int]:
        """See Drafter; none before NextTokenDrafts.draft was called."""
        self._model.asked.append((self, 0 if self.drafted else most))
        return self.drafted[: max(0, most)]

    def extend(self, tokens: Sequence[int], drafted: int) -> None:
        self.check(tokens, drafted)


class NextTokenDrafts(ModelRate, StepCost):
    """Drafts tokens for many sequences by a layer that predicts a further one."""

    def __init__(self, layer: NextTokens) -> None:
        super().__init__()
        self._layer = layer
        self.asked: list[tuple[NextTokenSequence, int]] = []

    def sequence(self, prompt: NDArray[np.int32]) -> NextTokenSequence:
        return NextTokenSequence(self)

    def draft(self, most: Callable[[float], int], groups: Iterable[SequenceGroup]) -> None:
        rows: list[Row] = []
        asked: list[tuple[NextTokenSequence, int]] = []
        for group in groups:
            self.asked.clear()
            group.strategy.drafts(most)
            if self.asked:  # by each of its sequences
                rows += group.newest()
                asked += self.asked
        if any(count > 0 for _, count in asked):
            found = self._layer.draft(rows, [count for _, count in asked])
            for (sequence, count), tokens in zip(asked, found, strict=True):
                if count > 0:
                    sequence.drafted = tokens


class DraftModel(ModelRate):
    """Drafts tokens for many sequences where that saves time. See StepCost."""

    most_drafted = MOST_DRAFTED

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        """`vocab_size`: of the model that verifies; the rest of a vocabulary is padding."""
        self._backend, self._vocab = backend, vocab_size
        self._owners: list[DraftSequence | None] = [None] * backend.info.slots
        self._used = [0] * backend.info.slots
        self._clock = 0
        self.asked: list[tuple[DraftSequence, int]] = []
        self._cost = StepCost()
        self._reading_s = 0.0  # of the step that is under way

    def sequence(self, prompt: NDArray[np.int32]) -> DraftSequence:
        return DraftSequence(self, prompt)

    def most(self, sequences: int, rate: float) -> int:
        """See StepCost. What it took to read a text has to be gained again by drafts."""
        return self._cost.worth(sequences, rate)

    def took(self, sequences: int, drafted: int, accepted: int, seconds: float) -> None:
        self._cost.took(sequences, drafted, accepted, seconds, self._reading_s)
        self._reading_s = 0.0

    def draft(self, most: Callable[[float], int], groups: Iterable[SequenceGroup]) -> None:
        """Compute what the groups' strategies give as `drafts` for the same `most` until the next
        step is over."""
        self.asked.clear()
        for group in groups:
            group.strategy.drafts(most)
        if not (asked := self._admitted()):
            return
        began = time.perf_counter()
        rows: list[Row] = []
        ready: list[tuple[DraftSequence, int, int]] = []
        room = self._backend.info.budget - len(asked)  # besides a token of each
        for sequence, count in asked:
            slot = self._slot(sequence, asked)
            rest = sequence.text[sequence.known :]
            chunk = np.array(rest[: 1 + min(_CHUNK, room)], np.int32)
            room -= len(chunk) - 1
            whole = len(chunk) == len(rest)
            rows.append(Row(slot, chunk, sequence.known, logits=int(whole), drafts=whole))
            if whole:
                ready.append((sequence, slot, count))
        reads = any(sequence.behind for sequence, _ in asked)
        logits = self._backend.forward(rows)
        if reads:
            self._reading_s += time.perf_counter() - began
        for (sequence, _), row in zip(asked, rows, strict=True):
            sequence.known += len(row.tokens)
        while ready:
            tokens = logits[:, : self._vocab].argmax(axis=1).tolist()
            for (sequence, _, _), token in zip(ready, tokens, strict=True):
                sequence.drafted.append(token)
            ready = [one for one in ready if len(one[0].drafted) < one[2]]
            if ready:
                logits = self._backend.forward([_newest(*one[:2]) for one in ready])

    def _admitted(self) -> list[tuple[DraftSequence, int]]:
        """The requested drafts that can and may be computed in this step."""
        info, reads, blocks = self._backend.info, False, 0
        admitted: list[tuple[DraftSequence, int]] = []
        for sequence, count in self.asked:
            count = min(count, info.max_length - len(sequence.text))
            new = sequence.text[sequence.known :]
            if count < 1 or len(admitted) == info.slots or max(new) >= info.vocab_size:
                continue
            if sequence.behind and (reads or self._cost.credit < 0):
                continue  # one at a time: its cost is known in the next step
            if info.memory is not None:
                needed = info.memory.blocks_of(len(sequence.text) + count)
                if blocks + needed > info.memory.blocks:
                    continue
                blocks += needed
            reads = reads or sequence.behind
            admitted.append((sequence, count))
        self._make_room(admitted, blocks)
        return admitted

    def _make_room(self, asked: Sequence[tuple[DraftSequence, int]], blocks: int) -> None:
        """Give back the memory of other sequences, until there are so many blocks."""
        if (memory := self._backend.info.memory) is None or not memory.scarce:
            return
        working = [sequence for sequence, _ in asked]
        for slot in sorted(range(len(self._owners)), key=lambda slot: -self._used[slot]):
            one = self._owners[slot]
            if one is None or one in working:
                continue
            # Of a draft that was refused, keys may be behind the known ones.
            blocks += memory.blocks_of(one.known + MOST_DRAFTED)
            if blocks > memory.blocks:
                assert isinstance(self._backend, Paged)
                self._backend.release(slot, 0)
                self._leave(one)

    def _slot(self, sequence: DraftSequence, asked: Sequence[tuple[DraftSequence, int]]) -> int:
        """The slot of a sequence: its own, else the one with the longest prefix of its text, or
        that was not used for the longest time."""
        self._clock += 1
        if sequence.slot is None:
            working = {one.slot for one, _ in asked}
            free = [slot for slot in range(len(self._owners)) if slot not in working]
            held = {
                slot: one.text[: one.known] if (one := self._owners[slot]) else [] for slot in free
            }
            shared = {slot: _shared(held[slot], sequence.text[:-1]) for slot in free}
            if (usable := self._backend.info.usable) is not None:
                shared = {slot: usable(slot, length) for slot, length in shared.items()}
            slot = max(free, key=lambda one: (shared[one], -self._used[one]))
            if (owner := self._owners[slot]) is not None:
                self._leave(owner)
            if isinstance(self._backend, Paged) and self._backend.info.memory is not None:
                self._backend.release(slot, shared[slot])
            self._owners[slot], sequence.slot, sequence.known = sequence, slot, shared[slot]
        self._used[sequence.slot] = self._clock
        return sequence.slot

    def _leave(self, sequence: DraftSequence) -> None:
        assert sequence.slot is not None
        self._owners[sequence.slot] = None
        sequence.slot, sequence.known = None, 0


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two texts begin with."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _newest(sequence: DraftSequence, slot: int) -> Row:
    """The row of the token that was drafted last."""
    place = len(sequence.text) + len(sequence.drafted) - 1
    return Row(slot, np.array(sequence.drafted[-1:], np.int32), place)


Drafts = DraftModel | NextTokenDrafts | PromptLookups
