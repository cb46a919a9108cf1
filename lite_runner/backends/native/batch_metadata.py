"""Batch metadata of a native step: tokens with their cache slots and position ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.positions import (
    Ints,
    PromptPrefix,
    RotaryAngles,
    last_seen,
    positions_of,
    prefix_angles,
)
from lite_runner.architectures.spec import Decoder, Prefix
from lite_runner.backends.base import Row
from lite_runner.records import dataclass


class SlotPrefixes:
    """The prefix of the prompt in each slot, as part of its cache."""

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self._of: dict[int, PromptPrefix] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        """Record the prompts that begin among the rows, each being there as a whole."""
        for row in rows:
            if row.position == 0:
                self._of[row.slot] = PromptPrefix.of(self._prefix, row.tokens)

    def of(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Length and mask position of the prefix [n] in each of the slots [n]."""
        found = [self._of.get(int(slot), PromptPrefix()) for slot in slots]
        lengths = np.array([one.length for one in found], np.int64)
        return lengths, np.array([one.mask for one in found], np.int64)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]; all are read before any is written."""
        copied = [self._of.get(source, PromptPrefix()) for source in sources]
        self._of |= dict(zip(targets, copied, strict=True))


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of all rows, concatenated (no padding)."""

    rows: Sequence[Row]
    tokens: NDArray[np.int32]
    owner: NDArray[np.int64]  # row index of each token
    wanted: NDArray[np.int64]  # indices in `tokens` to return logits for

    @classmethod
    def of(cls, rows: Sequence[Row]) -> TokenBatch:
        lengths = [len(row.tokens) for row in rows]
        tokens = np.concatenate([row.tokens for row in rows])
        owner = np.repeat(np.arange(len(rows)), lengths)
        left = np.cumsum(lengths)[owner] - np.arange(len(tokens))  # remaining tokens of the row
        wanted = np.flatnonzero(left <= np.array([row.logits for row in rows])[owner])
        return cls(rows, tokens, owner, wanted)

    def parts(
        self, capacity: int, most_logits: int, *, whole_rows: bool, stops: Iterable[int] = ()
    ) -> Iterator[tuple[slice, slice]]:
        """Split into steps of at most `capacity` tokens, and at `stops`, in order: slices of
        `tokens` and of `wanted`. Raises ValueError for a row that is not to be split (`whole_rows`)
        and does not fit a step."""
        start = first = 0
        ahead = deque(stops)
        while start < len(self.tokens):
            while ahead and ahead[0] <= start:
                ahead.popleft()
            end = min(start + capacity, len(self.tokens), *list(ahead)[:1])
            last = int(np.searchsorted(self.wanted, end))
            if last > first + most_logits:
                last = first + most_logits
                end = int(self.wanted[last])
            if whole_rows and end < len(self.tokens):
                end = int(np.searchsorted(self.owner, self.owner[end]))  # where that row begins
                last = int(np.searchsorted(self.wanted, end))
                if end <= start:
                    raise ValueError(f"a row does not fit a step of {capacity} tokens")
            yield slice(start, end), slice(first, last)
            start, first = end, last

    def ends(self, part: slice) -> tuple[list[int], list[int]]:
        """Slots of a part, and the tokens that each has behind it."""
        owners, last = np.unique(self.owner[part][::-1], return_index=True)
        first = np.cumsum([0, *(len(row.tokens) for row in self.rows)])
        slots, ends = [], []
        for owner, back in zip(owners.tolist(), last.tolist(), strict=True):
            row = self.rows[owner]
            slots.append(row.slot)
            ends.append(row.position + part.stop - back - int(first[owner]))
        return slots, ends


def empty_metadata(capacity: int, most: int, prefix: Prefix | None = None) -> NDArray[np.int32]:
    """The metadata of a step without tokens, of at most `capacity` and with at most `most` rows of
    logits; `prefix`: the model's."""
    columns = 4 if prefix is None else 5
    return np.zeros(2 + columns * capacity + most, np.int32)


class BatchMetadata:
    """Builds the inputs of a step: see Step in native/src/layers.h."""

    def __init__(
        self, config: Decoder, length: int, capacity: int, *, reproducible: bool = False
    ) -> None:
        """`length`: positions per slot; `capacity`: tokens per step; `reproducible`: angles have
        the same bits on every processor."""
        self._capacity = capacity
        self._angles = _Angles(config, length, capacity, reproducible=reproducible)
        self._prefix = config.prefix
        self._prefixes = SlotPrefixes(config.prefix) if config.prefix is not None else None

    @property
    def table(self) -> NDArray[np.float32]:
        """Rotary table of all positions [rows, R * head_dim], cos then sin of each of the model's R
        rotary positions; only its shape is used where every step has its own (dynamic scaling,
        or block positions)."""
        return self._angles.table

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Account for copied cache slots."""
        if self._prefixes is not None:
            self._prefixes.copy(sources, targets)

    def of(
        self, every: TokenBatch, part: slice, wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Metadata and rotary table of a step over a `part` of the tokens, with logits after the
        `wanted` ones."""
        tokens, owner = every.tokens[part], every.owner[part]
        count, capacity, rows = len(tokens), self._capacity, every.rows
        metadata = empty_metadata(capacity, len(wanted), self._prefix)
        metadata[:2] = count, len(wanted)
        columns = metadata[2 : 2 + 4 * capacity].reshape(4, capacity)[:, :count]
        token, slot, position, angle = columns
        token[:] = tokens
        slot[:] = np.array([row.slot for row in rows], np.int32)[owner]
        first = np.cumsum([0, *(len(row.tokens) for row in rows[:-1])])
        offset = np.array([row.position for row in rows]) - first
        position[:] = np.arange(part.start, part.stop) + offset[owner]
        if self._prefixes is None:
            ends = np.array([row.end for row in rows])[owner]
            table = self._angles.of(position, ends, angle)
        else:
            self._prefixes.begin(rows)
            lengths, masks = self._prefixes.of(slot)
            metadata[-capacity:][:count] = last_seen(position, lengths)
            table = self._angles.two_dimensional(*positions_of(position, lengths, masks), angle)
        metadata[2 + 4 * capacity :][: len(wanted)] = wanted - part.start
        return metadata, table


class _Angles:
    """Rotary tables: by position; or per token of a step, with dynamic scaling and where positions
    are two-dimensional."""

    def __init__(self, config: Decoder, length: int, capacity: int, *, reproducible: bool) -> None:
        self.by_step = config.length_dependent
        self.table = np.zeros((1, 1), np.float32)
        angles = [
            RotaryAngles(one, config.head_dim, reproducible=reproducible) for one in config.rotaries
        ]
        self._two_dimensional = prefix_angles(config, length, reproducible=reproducible)
        if self.by_step:
            (self._angles,) = angles
            self.table = np.zeros((capacity, config.head_dim), np.float32)
        elif angles:
            self.table = np.concatenate([one for each in angles for one in each.table(length)], 1)

    def of(
        self, position: NDArray[np.int32], lengths: NDArray[np.int64], rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """The table; the table row of each token is written to `rows`."""
        if not self.by_step:
            rows[:] = position
            return self.table
        return self._of_step(self._angles.scaled(position, lengths), rows)

    def two_dimensional(
        self, position: Ints, block: Ints, rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """The same by positions and block positions."""
        assert self._two_dimensional is not None
        return self._of_step(self._two_dimensional.of(position, block), rows)

    def _of_step(
        self, angles: tuple[NDArray[np.float32], NDArray[np.float32]], rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        rows[:] = np.arange(len(rows))
        table = np.zeros(self.table.shape, np.float32)
        table[: len(rows)] = np.concatenate(angles, 1)
        return table
