"""Batch metadata of a native step: tokens with their cache slots and position ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.positions import RotaryAngles
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import Row
from lite_runner.mindir.manifest import TensorSpec


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

    def parts(self, capacity: int, most: int) -> Iterator[tuple[slice, slice]]:
        """Split into steps of at most `capacity` tokens and `most` rows of logits: slices of
        `tokens` and of `wanted`."""
        start = first = 0
        while start < len(self.tokens):
            end = min(start + capacity, len(self.tokens))
            last = int(np.searchsorted(self.wanted, end))
            if last > first + most:
                last = first + most
                end = int(self.wanted[last])
            yield slice(start, end), slice(first, last)
            start, first = end, last


def forward_in_steps(
    rows: Sequence[Row],
    capacity: int,
    most: int,
    vocab: int,
    step: Callable[[TokenBatch, slice, NDArray[np.int64]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Logits [sum of row.logits, vocab] of rows that are computed in steps of at most `capacity`
    tokens and `most` rows of logits; `step` computes a part of the tokens, and returns the logits
    after its wanted ones."""
    every = TokenBatch.of(rows)
    logits = np.empty((len(every.wanted), vocab), np.float32)
    for part, here in every.parts(capacity, most):
        logits[here] = step(every, part, every.wanted[here])
    return logits


def empty_metadata(capacity: int, most: int) -> NDArray[np.int32]:
    """The metadata of a step without tokens, of at most `capacity` and with at most `most` rows of
    logits."""
    return np.zeros(2 + 4 * capacity + most, np.int32)


class BatchMetadata:
    """Builds the inputs of a step: see Step in native/src/layers.h."""

    def __init__(self, config: Decoder, length: int, capacity: int) -> None:
        """`length`: positions per slot; `capacity`: tokens per step."""
        self._vocab, self._capacity = config.vocab_size, capacity
        self._angles = _Angles(config, length, capacity)

    @property
    def table(self) -> NDArray[np.float32]:
        """Rotary table of all positions [rows, R * head_dim], cos then sin of each of the model's R
        rotary positions; with `new_tables` only its
        shape is used."""
        return self._angles.table

    @property
    def new_tables(self) -> bool:
        """Whether every step has its own rotary table (dynamic scaling)."""
        return self._angles.dynamic

    def specs(self, most: int) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """Inputs of an exported step, which has no adapters."""
        return (
            TensorSpec("step", empty_metadata(self._capacity, most).shape, "int32"),
            TensorSpec("rope", self.table.shape, "float32"),
            TensorSpec("places", (1,), "int32"),  # the adapter slots; the name is in manifests
        )

    def of(
        self, every: TokenBatch, part: slice, wanted: NDArray[np.int64], most: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Metadata and rotary table of a step over a `part` of the tokens, with logits after the
        `wanted` ones. Raises ValueError for a token outside the vocabulary."""
        tokens, owner = every.tokens[part], every.owner[part]
        if tokens.min() < 0 or tokens.max() >= self._vocab:
            raise ValueError(f"token ids must be 0 to {self._vocab - 1}")
        count, capacity, rows = len(tokens), self._capacity, every.rows
        metadata = empty_metadata(capacity, most)
        metadata[:2] = count, len(wanted)
        columns = metadata[2 : 2 + 4 * capacity].reshape(4, capacity)[:, :count]
        token, slot, position, angle = columns
        token[:] = tokens
        slot[:] = np.array([row.slot for row in rows], np.int32)[owner]
        first = np.cumsum([0, *(len(row.tokens) for row in rows[:-1])])
        offset = np.array([row.position for row in rows]) - first
        position[:] = np.arange(part.start, part.stop) + offset[owner]
        table = self._angles.of(position, np.array([row.end for row in rows])[owner], angle)
        metadata[2 + 4 * capacity :][: len(wanted)] = wanted - part.start
        return metadata, table


class _Angles:
    """Rotary tables: by position, or with dynamic scaling per token of a step."""

    def __init__(self, config: Decoder, length: int, capacity: int) -> None:
        self.dynamic = config.length_dependent
        self.table = np.zeros((1, 1), np.float32)
        angles = [RotaryAngles(one, config.head_dim) for one in config.rotaries]
        if self.dynamic:
            (self._angles,) = angles
            self.table = np.zeros((capacity, config.head_dim), np.float32)
        elif angles:
            self.table = np.concatenate([one for each in angles for one in each.table(length)], 1)

    def of(
        self, position: NDArray[np.int32], lengths: NDArray[np.int64], rows: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """The table; the table row of each token is written to `rows`."""
        if not self.dynamic:
            rows[:] = position
            return self.table
        rows[:] = np.arange(len(position))
        table = np.zeros(self.table.shape, np.float32)
        table[: len(position)] = np.concatenate(self._angles.scaled(position, lengths), 1)
        return table
