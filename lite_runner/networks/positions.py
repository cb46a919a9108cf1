"""Positions of a step, for all layers: prefixes of prompts, and rotary angles."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from lite_runner.architectures import positions as rope
from lite_runner.architectures.positions import prefix_angles
from lite_runner.architectures.spec import Decoder, Prefix, Rotary
from lite_runner.networks.layers import CacheSize, by_token, indices


class Prefixes(nn.Cell):
    """Length and mask position of the prefix in each row: see PromptPrefix in
    architectures/positions.py.

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
        for token in self.masks[::-1]:  # the first one wins
            before = ops.logical_and(tokens == token, index < end)
            where = self.first(ops.select(before, index, nowhere), 1)
            mask = ops.select(where == size, mask, where)
        return ops.concat((end, mask), 1)


def _state(cache: CacheSize, name: str) -> Parameter:
    return Parameter(Tensor(np.zeros((cache.slots, 2), np.int32)), name, False)


def two_positions(prefix: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """prefix [R, 2], positions [n] -> positions and block positions of the tokens [n]."""
    length, mask = by_token(prefix[:, 0], positions), by_token(prefix[:, 1], positions)
    blocks = ops.maximum(positions - length + 1, 0)
    return ops.select(positions < length, positions, mask), blocks


class Angles(nn.Cell):
    """cos and sin for queries and keys, broadcast over the heads once per step."""

    def __init__(self, model: Decoder, rotary: Rotary, length: int) -> None:
        """`length`: number of position ids."""
        super().__init__()
        self.heads = model.num_heads + model.n_kv_heads
        self.head_dim = model.head_dim
        scaling = rotary.dynamic
        self.dynamic, self.two_dimensional = scaling is not None, rotary.two_dimensional
        if rotary.two_dimensional:
            self._model = model
            self._tables(length)
        elif scaling is not None:
            frequencies, magnitude = rope.frequencies(rotary, model.head_dim)
            self.frequencies = Tensor(frequencies)
            self.factor, self.original = scaling.factor, scaling.original_seq_length
            self.two_lists = scaling.type == "longrope"
            if self.two_lists:
                self.long = Tensor(rope.long_frequencies(rotary, model.head_dim))
                self.magnitude = Tensor(np.broadcast_to(np.float32(magnitude), frequencies.shape))
            else:
                self.exponents = Tensor(rope.dynamic_exponents(model.head_dim))
        else:
            self._angles = rope.RotaryAngles(rotary, model.head_dim)
            self._tables(length)

    def resize(self, cache: CacheSize) -> None:
        if not self.dynamic:
            self._tables(cache.length)

    def _tables(self, length: int) -> None:
        if self.two_dimensional:
            tables = prefix_angles(self._model, length)
            assert tables is not None
            self.cos, self.sin = Tensor(tables.cos), Tensor(tables.sin)
            return
        cos, sin = rope.for_halves(*self._angles.table(length))
        self.cos, self.sin = Tensor(cos), Tensor(sin)

    def construct(
        self, positions: Tensor, length: Tensor, blocks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """positions [n], length [R] -> cos and sin [n, H + K, D]; sin's first half is negated.
        `blocks` [n]: block positions, if positions are two-dimensional."""
        if blocks is not None:
            cos = self.both(self.cos, positions, blocks)
            sin = self.both(self.sin, positions, blocks)
            cos, sin = ops.concat((cos, cos), -1), ops.concat((-sin, sin), -1)
        elif self.dynamic:
            cos, sin = self.dynamic_angles(positions, length)
        else:
            cos, sin = ops.gather(self.cos, positions, 0), ops.gather(self.sin, positions, 0)
        shape = (cos.shape[0], self.heads, self.head_dim)
        cos, sin = cos.reshape(-1, 1, self.head_dim), sin.reshape(-1, 1, self.head_dim)
        return ops.broadcast_to(cos, shape), ops.broadcast_to(sin, shape)

    def both(self, table: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
        """[n, D / 2]: a table's rows of the positions, then of the block positions."""
        return ops.concat((ops.gather(table, positions, 0), ops.gather(table, blocks, 0)), -1)

    def dynamic_angles(self, positions: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Beyond the original length dynamic NTK lets the base grow with the row's length, and
        longrope takes the long frequencies."""
        if self.two_lists:
            is_long = (length > self.original).astype(ms.float32).reshape(-1, 1)
            frequencies = self.long * is_long + self.frequencies * (1.0 - is_long)
        else:
            length = ops.maximum(length.astype(ms.float32), float(self.original))
            ratio = length * (self.factor / self.original) - (self.factor - 1.0)
            frequencies = self.frequencies * ops.pow(ratio.reshape(-1, 1), self.exponents)
        count, half = frequencies.shape
        angles = positions.astype(ms.float32).reshape(count, -1, 1) * frequencies.reshape(
            count, 1, half
        )
        angles = angles.reshape(-1, half)
        cos, sin = ops.cos(angles), ops.sin(angles)
        if self.two_lists:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return ops.concat((cos, cos), -1), ops.concat((-sin, sin), -1)


class Rotate(nn.Cell):
    """Applies rotary position embedding to queries and keys."""

    def __init__(self, query_width: int, head_dim: int) -> None:
        """`query_width`: H * D."""
        super().__init__()
        self.query_width, self.half = query_width, head_dim // 2
        self.side_by_side, self.swap = ops.Concat(1), ops.Concat(2)

    def construct(
        self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """q [n, H * D], k [n, K * D] -> the same shapes; both are rotated together."""
        cos, sin = angles
        x = self.side_by_side((q, k)).reshape(cos.shape)
        x = x * cos + self.swap((x[:, :, self.half :], x[:, :, : self.half])) * sin
        x = x.reshape(x.shape[0], -1)
        return x[:, : self.query_width], x[:, self.query_width :]
