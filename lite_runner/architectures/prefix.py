"""Positions of a prefix LM (ChatGLM-6B): two of each token, and where its prefix ends.

In a prompt with c tokens before the end token, and a mask token at m < c: positions are 0 to c - 1
and then m for all that is generated; block positions are 0 for the prefix, then 1, 2, 3 and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder, Prefix, Rotary
from lite_runner.records import dataclass

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class PromptPrefix:
    """The prefix of one prompt. Without the tokens that mark it, attention is plainly causal."""

    length: int = 0  # c
    mask: int = 0  # m

    @classmethod
    def of(cls, prefix: Prefix, tokens: Ints) -> PromptPrefix:
        """That of the prompt `tokens` [n]."""
        ends = np.flatnonzero(tokens == prefix.end_token_id)
        length = int(ends[0]) if len(ends) else 0
        for mask in prefix.mask_token_ids:
            found = np.flatnonzero(tokens[:length] == mask)
            if len(found):
                return cls(length, int(found[0]))
        return cls(length)


def fault(prefix: Prefix, tokens: Sequence[int]) -> str | None:
    """What a prompt lacks; None: nothing."""
    if prefix.end_token_id not in tokens:
        return f"has no token {prefix.end_token_id} (sop), which ends the prefix"
    before = tokens[: tokens.index(prefix.end_token_id)]
    if not set(before) & set(prefix.mask_token_ids):
        expected = " or ".join(map(str, prefix.mask_token_ids))
        return f"has no token {expected} (a mask) before its token {prefix.end_token_id} (sop)"
    return None


def positions_of(index: Ints, length: Ints, mask: Ints) -> tuple[Ints, Ints]:
    """Positions and block positions of tokens by their `index` in the sequence; `length` and `mask`
    are those of their prompts' prefixes."""
    return np.where(index < length, index, mask), np.maximum(index - length + 1, 0)


def last_seen(index: Ints, length: Ints) -> Ints:
    """Index of the last key that each token sees."""
    return np.maximum(index, length - 1)


class TwoDimensionalAngles:
    """cos and sin of the angles of two-dimensional positions."""

    def __init__(self, rotary: Rotary, head_dim: int, length: int) -> None:
        """`length`: number of positions."""
        pairs = head_dim // 4
        exponents = np.arange(pairs, dtype=np.float32) / np.float32(pairs)
        frequencies = (np.float32(1.0) / np.float32(rotary.theta) ** exponents).astype(np.float16)
        # Block positions may reach the length itself.
        angles = np.outer(np.arange(length + 1).astype(np.float16), frequencies)
        self.cos, self.sin = (
            one(angles.astype(np.float32)).astype(np.float16).astype(np.float32)
            for one in (np.cos, np.sin)
        )

    def of(self, position: Ints, block: Ints) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin [n, head_dim / 2] for positions and block positions [n]."""
        cos, sin = (
            np.concatenate([table[position], table[block]], 1) for table in (self.cos, self.sin)
        )
        return cos, sin


def prefix_angles(model: Decoder, length: int) -> TwoDimensionalAngles | None:
    """The tables for `length` positions; None: the model has other positions."""
    if model.rotary is None or not model.rotary.two_dimensional:
        return None
    return TwoDimensionalAngles(model.rotary, model.head_dim, length)
