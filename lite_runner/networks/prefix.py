"""Prefixes of prompts in a network: where each ends, and the positions that follow from it."""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from lite_runner.architectures.spec import Prefix
from lite_runner.networks.layers import CacheSize, indices


class Prefixes(nn.Cell):
    """Length and mask position of the prefix in each row: see architectures.prefix.

    With a cache they are kept by slot, as keys and values are.
    """

    def __init__(self, prefix: Prefix, cache: CacheSize | None) -> None:
        super().__init__()
        self.end, self.masks = prefix.end_token_id, prefix.mask_token_ids
        self.first = ops.ReduceMin(keep_dims=True)
        self.update, self.gather = ops.ScatterUpdate(), ops.Gather()
        self.cached = cache is not None
        if cache is not None:
            self.state = _state(cache, "state")

    def resize(self, cache: CacheSize) -> None:
        self.state = _state(cache, self.state.name)

    def construct(
        self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor | None
    ) -> Tensor:
        """tokens [R, T], position and length [R] -> [R, 2]; a prompt begins at position 0."""
        if slot is None:
            return self.state
        found = self.in_prompt(tokens)
        if not self.cached:
            return found
        # A row of length 0 is padding: its slot is another step's.
        begins = ops.logical_and(position == 0, length > 0).reshape(-1, 1)
        begins = ops.broadcast_to(begins, (tokens.shape[0], 2))
        known = ops.select(begins, found, self.gather(self.state, slot, 0))
        return ops.depend(known, self.update(self.state, slot, known))

    def in_prompt(self, tokens: Tensor) -> Tensor:
        """tokens [R, T] -> [R, 2]"""
        size = tokens.shape[1]
        index = indices(size).reshape(1, -1)
        nowhere = ops.zeros_like(tokens) + size
        index = ops.zeros_like(tokens) + index
        end = self.first(ops.select(tokens == self.end, index, nowhere), 1)
        end = ops.select(end == size, ops.zeros_like(end), end)
        mask = ops.zeros_like(end)
        for token in self.masks[::-1]:  # the first that occurs wins
            before = ops.logical_and(tokens == token, index < end)
            where = self.first(ops.select(before, index, nowhere), 1)
            mask = ops.select(where == size, mask, where)
        return ops.concat((end, mask), 1)


def _state(cache: CacheSize, name: str) -> Parameter:
    return Parameter(Tensor(np.zeros((cache.slots, 2), np.int32)), name, False)


def by_token(rows: Tensor, positions: Tensor) -> Tensor:
    """A value of each row [R] for each of its tokens; positions [n] -> [n]."""
    spread = positions.reshape(rows.shape[0], -1) * 0 + rows.reshape(-1, 1)
    return spread.reshape(-1)


def two_positions(prefix: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """prefix [R, 2], positions [n] -> positions and block positions of the tokens [n]."""
    length, mask = by_token(prefix[:, 0], positions), by_token(prefix[:, 1], positions)
    blocks = ops.maximum(positions - length + 1, 0)
    return ops.select(positions < length, positions, mask), blocks
