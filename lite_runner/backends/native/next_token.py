"""Drafts of a model's layer for multi-token prediction: see architectures/next_token.py.

The layer has keys of its own, so it follows every text: a pair of a token's hidden state and the
next token at each position. It does so a few tokens late, many in a step, so that steps without
drafts cost no more than a copy of hidden states. Where some are missing (a slot that goes on from a
prefix), keys are those of other pairs: drafts may be worse, and results do not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Row
from lite_runner.backends.block_pool import BlockPool
from lite_runner.backends.native.backend import BatchMetadata, TokenBatch
from lite_runner.native.model import BLOCK, NativeModel, NativeOptions
from lite_runner.native.structs import Packed
from lite_runner.records import dataclass

LATE = 32  # tokens of a slot that are followed together


@dataclass
class _Pending:
    """Tokens of a slot whose hidden states are known, and are not followed yet."""

    start: int = 0  # position of the first
    tokens: list[int] = field(default_factory=list)
    hidden: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def truncate(self, length: int) -> None:
        """Drop all after the first `length` tokens of the slot."""
        del self.tokens[max(0, length - self.start) :], self.hidden[max(0, length - self.start) :]
        self.start = min(self.start, length)

    def copy(self) -> _Pending:
        return _Pending(self.start, list(self.tokens), list(self.hidden))


class NextToken:
    """The layer, with its cache for each slot of the model."""

    def __init__(self, config: Decoder, layers: Sequence[Packed], model: NativeModel) -> None:
        """`layers`: as `pack` returns them; `model`: whose embedding and head it has."""
        self.config, self._main = config, model
        self._model = model.further(config, layers)

    def resize(self, options: NativeOptions, capacity: int, *, reproducible: bool) -> None:
        sizes = self.config, options.length, capacity
        self._metadata = BatchMetadata(*sizes, reproducible=reproducible)
        # As large as all slots need: it is one layer, and others than the model's rows are written.
        self._pool = pool = BlockPool(options.slots, options.length, BLOCK)
        self._model.resize(options, capacity, self._metadata.table, pool.tables, pool.size)
        self._capacity = capacity
        self._pending = [_Pending() for _ in range(options.slots)]

    def block_bytes(self, options: NativeOptions) -> int:
        return self._model.block_bytes(options.cache)

    def follow(self, every: TokenBatch, part: slice) -> None:
        """Take the hidden states of the part of a batch that the model has just computed."""
        hidden = self._main.hidden(np.arange(part.stop - part.start))
        rows: list[Row] = []
        joined: list[NDArray[np.float32]] = []
        for row, first in every.starts():
            begin, end = max(first, part.start), min(first + len(row.tokens), part.stop)
            if begin >= end:
                continue
            pending = self._at(row.slot, row.position + begin - first)
            pending.tokens += row.tokens[begin - first : end - first].tolist()
            # No views, which would keep those of the whole step.
            pending.hidden += [one.copy() for one in hidden[begin - part.start : end - part.start]]
            kept = row.logits if row.drafts else 1  # drafts may be refused
            if (count := len(pending.tokens) - kept) >= LATE:
                rows.append(_pairs(row.slot, pending, pending.tokens[1 : count + 1], logits=0))
                joined += pending.hidden[:count]
                pending.start += count
                del pending.tokens[:count], pending.hidden[:count]
        if rows:
            self._run(rows, joined)

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        """See NextTokens: none where the hidden state of the token before is not known."""
        drafted: list[list[int]] = [[] for _ in rows]
        ready, first, hidden = [], [], []
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            pending = self._at(row.slot, row.position)
            if count > 0 and pending.tokens:
                ready.append(index)
                first.append(_pairs(row.slot, pending, [*pending.tokens[1:], *row.tokens.tolist()]))
                hidden += pending.hidden
                self._pending[row.slot] = _Pending(row.position)
        while ready:
            logits, states = self._run(first, hidden)
            tokens = logits[:, : self.config.vocab_size].argmax(axis=1).tolist()
            for index, token in zip(ready, tokens, strict=True):
                drafted[index].append(token)
            more = [place for place, one in enumerate(ready) if len(drafted[one]) < counts[one]]
            ready, hidden = [ready[place] for place in more], [states[place] for place in more]
            first = [_behind(rows[index], drafted[index]) for index in ready]
        return drafted

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Backend.copy."""
        self._pool.fork(sources, targets)
        copies = [self._pending[source].copy() for source in sources]
        for target, pending in zip(targets, copies, strict=True):
            self._pending[target] = pending

    def release(self, slot: int, length: int) -> None:
        self._pool.release(slot, length)
        self._pending[slot].truncate(length)

    def close(self) -> None:
        """Release the memory."""
        self._model.close()

    def _at(self, slot: int, position: int) -> _Pending:
        """Pending tokens of a slot in front of a position."""
        pending = self._pending[slot]
        pending.truncate(position)
        if pending.end != position:
            self._pending[slot] = pending = _Pending(position)
        return pending

    def _run(
        self, rows: Sequence[Row], hidden: Sequence[NDArray[np.float32]]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits and hidden states of the wanted tokens; `hidden`: what the tokens of all rows are
        joined with."""
        copy = partial(self._model.copy_block, self._pool.tables)
        self._pool.reserve([row.part for row in rows], copy)
        every, joined = TokenBatch.of(rows), np.stack(hidden)
        logits, states = [], []
        for part, here in every.parts(self._capacity, len(rows), whole_rows=False):
            wanted = every.wanted[here]
            self._model.joined[: part.stop - part.start] = joined[part]
            metadata, table = self._metadata.of(every, part, wanted)
            logits.append(self._model.run(metadata, table, None, len(wanted)).copy())
            states.append(self._model.hidden(wanted - part.start))
        return np.concatenate(logits), np.concatenate(states)


def _pairs(slot: int, pending: _Pending, tokens: Sequence[int], logits: int = 1) -> Row:
    """The row of the pairs of what is pending: a token's hidden state, and the next of `tokens`."""
    return Row(slot, np.array(tokens, np.int32), pending.start, logits=logits)


def _behind(row: Row, drafted: Sequence[int]) -> Row:
    """The row of the token that was drafted last."""
    return Row(row.slot, np.array(drafted[-1:], np.int32), row.position + len(drafted) - 1)
