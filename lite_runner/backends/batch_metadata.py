"""What a step of our own operators is told: tokens, whose they are, and where they stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import positions
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import Row
from lite_runner.mindir.manifest import TensorSpec


@dataclass(frozen=True)
class RowTokens:
    """The tokens of some rows, one row after the other."""

    rows: Sequence[Row]
    tokens: NDArray[np.int32]
    owner: NDArray[np.int64]  # index of each token's row
    wanted: NDArray[np.int64]  # the places in `tokens` of those that logits are wanted after

    @classmethod
    def of(cls, rows: Sequence[Row]) -> RowTokens:
        lengths = [len(row.tokens) for row in rows]
        tokens = np.concatenate([row.tokens for row in rows])
        owner = np.repeat(np.arange(len(rows)), lengths)
        left = np.cumsum(lengths)[owner] - np.arange(len(tokens))  # of its row, from each token on
        wanted = np.flatnonzero(left <= np.array([row.logits for row in rows])[owner])
        return cls(rows, tokens, owner, wanted)

    def parts(self, capacity: int, most: int) -> Iterator[tuple[slice, slice]]:
        """Of each step of at most `capacity` tokens and `most` rows of logits: which of `tokens`
        are its own, and which of `wanted`."""
        start = first = 0
        while start < len(self.tokens):
            end = min(start + capacity, len(self.tokens))
            last = int(np.searchsorted(self.wanted, end))
            if last > first + most:
                last = first + most
                end = int(self.wanted[last])
            yield slice(start, end), slice(first, last)
            start, first = end, last


class BatchMetadata:
    """Makes the inputs of steps: see Step in kernels/src/layers.h."""

    def __init__(self, config: Decoder, length: int, capacity: int) -> None:
        """`length`: positions of a slot; `capacity`: tokens of a step."""
        self._vocab, self._capacity = config.vocab_size, capacity
        self._angles = _Angles(config, length, capacity)

    @property
    def table(self) -> NDArray[np.float32]:
        """The rotary angles of every position [rows, head_dim], cos and then sin; with
        `new_tables` only their shape counts."""
        return self._angles.table

    @property
    def new_tables(self) -> bool:
        """Whether every step has a table of its own."""
        return self._angles.dynamic

    def empty(self, most: int) -> NDArray[np.int32]:
        """A step without tokens, with room for the logits of `most`."""
        return np.zeros(2 + 4 * self._capacity + most, np.int32)

    def specs(self, most: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """What a step without adapters takes."""
        return (
            TensorSpec("step", self.empty(most).shape, "int32"),
            TensorSpec("rope", self.table.shape, "float32"),
            TensorSpec("places", (1,), "int32"),
        )

    def of(
        self, every: RowTokens, part: slice, wanted: NDArray[np.int64], most: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The words of a step over a part of the tokens, and its table; the logits after those
        that are `wanted` are asked for. A token that the model does not have is a ValueError."""
        tokens, owner = every.tokens[part], every.owner[part]
        if tokens.min() < 0 or tokens.max() >= self._vocab:
            raise ValueError(f"token ids must be 0 to {self._vocab - 1}")
        count, capacity, rows = len(tokens), self._capacity, every.rows
        words = self.empty(most)
        words[:2] = count, len(wanted)
        token, slot, position, angle = words[2 : 2 + 4 * capacity].reshape(4, capacity)[:, :count]
        token[:] = tokens
        slot[:] = np.array([row.slot for row in rows], np.int32)[owner]
        first = np.cumsum([0, *(len(row.tokens) for row in rows[:-1])])
        offset = np.array([row.position for row in rows]) - first
        position[:] = np.arange(part.start, part.stop) + offset[owner]
        table = self._angles.of(position, np.array([row.end for row in rows])[owner], angle)
        words[2 + 4 * capacity :][: len(wanted)] = wanted - part.start
        return words, table


class _Angles:
    """Rotary angles: a table by position, or with dynamic scaling of each token in a step."""

    def __init__(self, config: Decoder, length: int, capacity: int) -> None:
        self.dynamic = config.length_dependent
        self.table = np.zeros((1, 1), np.float32)
        rotary = config.rotary
        if rotary is None:
            return
        self._frequencies, factor = positions.frequencies(rotary, config.head_dim)
        scaling = rotary.dynamic
        if scaling is not None:
            self._original, self._factor = scaling.original_seq_length, scaling.factor
            self._exponents = positions.dynamic_exponents(config.head_dim)
            self.table = np.zeros((capacity, config.head_dim), np.float32)
        else:
            places = np.arange(length, dtype=np.float32)
            self.table = _cos_and_sin(np.outer(places, self._frequencies)) * factor

    def of(
        self, position: NDArray[np.int32], lengths: NDArray[np.int64], rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """The table, after the row of each token in it was written to `rows`."""
        if not self.dynamic:
            rows[:] = position
            return self.table
        # The base grows with the row's own length once that is past the original.
        longest = np.maximum(lengths, self._original).astype(np.float32)
        ratio = longest * np.float32(self._factor / self._original) - np.float32(self._factor - 1)
        frequencies = self._frequencies * ratio[:, None] ** self._exponents
        rows[:] = np.arange(len(position))
        table = np.zeros(self.table.shape, np.float32)
        table[: len(position)] = _cos_and_sin(position.astype(np.float32)[:, None] * frequencies)
        return table


def _cos_and_sin(angles: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, head_dim / 2] -> [n, head_dim]."""
    angles = angles.astype(np.float32)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1)
