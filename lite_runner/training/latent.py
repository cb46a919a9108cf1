"""Latent attention (MLA) on the tape, as queries, keys and values of plain heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Latent, Rotary
from lite_runner.training import tape as ops
from lite_runner.training.kernels import Array
from lite_runner.training.tape import Tape, Value

Columns = NDArray[np.int64]


class LatentHeads:
    """Places of the numbers of each head: plain ones, then rotated ones, then zeros."""

    def __init__(self, latent: Latent, heads: int) -> None:
        plain, rotated, value = latent.plain, latent.rotated, latent.value
        self.width = max(plain + rotated, value)
        of_head = np.arange(heads)[:, None]
        zeros = np.full((heads, self.width), -1)
        asked = of_head * (plain + rotated) + np.arange(plain + rotated)
        self.rotated = asked[:, plain:].reshape(-1)  # columns of the queries
        turned = heads * (plain + rotated) + of_head * rotated + np.arange(rotated)
        self.queries = _filled(zeros, asked[:, :plain], turned)  # of them, then those turned
        wide = of_head * (plain + value) + np.arange(plain + value)
        shared = np.broadcast_to(heads * (plain + value) + np.arange(rotated), (heads, rotated))
        self.keys = _filled(zeros, wide[:, :plain], shared)
        self.values = _filled(zeros, wide[:, plain:])
        self.out = (of_head * self.width + np.arange(value)).reshape(-1)


def _filled(zeros: Columns, *parts: Columns) -> Columns:
    found: Columns = np.concatenate([*parts, zeros], axis=1)[:, : zeros.shape[1]]
    return found.reshape(-1)


def own_rotary(rotary: Rotary) -> Rotary:
    """The rotary embedding of only the rotated numbers."""
    return replace(rotary, dims=None)


def columns(tape: Tape, parts: Sequence[Value], taken: Columns) -> Value:
    """[n, width]: columns of the parts side by side, each any number of times; -1: zeros."""
    widths = [part.array.shape[1] for part in parts]
    count = len(parts[0].array)
    nothing = np.zeros((count, 1), np.float32)
    whole = np.concatenate([*(part.array for part in parts), nothing], axis=1)

    def backward(grad: Array) -> None:
        total = np.zeros((sum(widths) + 1, count), np.float32)
        np.add.at(total, taken, grad.T)
        ends = np.cumsum(widths)
        for part, own in zip(parts, np.split(total, ends)[:-1], strict=True):
            if part.slot is not None:
                part.slot.add(np.ascontiguousarray(own.T))

    return tape.record(whole[:, taken], parts, backward)


def rotated_queries(tape: Tape, query: Value, heads: LatentHeads, cos: Array, sin: Array) -> Value:
    """[n, heads * width]"""
    turned = ops.rotated(tape, columns(tape, [query], heads.rotated), cos, sin)
    return columns(tape, [query, turned], heads.queries)
