"""Bytes and multiply-adds of native layers, and the rates that this machine reaches."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from lite_runner import native
from lite_runner.native.matrices import matrix
from lite_runner.native.structs import (
    AttentionLayer,
    Block,
    EmbeddingLayer,
    FeedForwardLayer,
    HeadLayer,
    Kind,
    RecurrentLayer,
)
from lite_runner.recorder import LayerCost
from lite_runner.system import memory

Struct = TypeVar("Struct", bound=ctypes.Structure)
READ_BYTES = 256 << 20  # more than processors cache
ROWS, WIDTH = 512, 1024  # of the product that is timed
ROUNDS = 5


def layer_costs(blocks: Sequence[Block], vocabulary: int, number_bytes: int) -> list[LayerCost]:
    """The costs of packed layers: embedding, attention and feed-forward in turn, head.
    `number_bytes`: of a number in the cache."""
    embedding = _struct(EmbeddingLayer, blocks[0])
    head = _struct(HeadLayer, blocks[-1])
    tied = 0 if head.matrix_offset else blocks[0].nbytes
    costs = [LayerCost(name="embedding", kind="embedding", weights=0, macs=0)]
    for index, block in enumerate(blocks[1:-1]):
        kind = Kind(int.from_bytes(block[:8].tobytes(), "little"))
        label = f"{kind.name.lower()} {index // 2}"
        if kind == Kind.ATTENTION:
            layer = _struct(AttentionLayer, block)
            costs.append(_attention(layer, block, label, number_bytes))
        elif kind == Kind.RECURRENT:
            costs.append(_recurrent(_struct(RecurrentLayer, block), block, label))
        elif kind == Kind.NONE:
            costs.append(LayerCost(name=label, kind="none", weights=0, macs=0))
        elif kind == Kind.JOIN:
            macs = 2 * embedding.hidden**2
            costs.append(LayerCost(name="join", kind="join", weights=block.nbytes, macs=macs))
        else:
            costs.append(_feed_forward(_struct(FeedForwardLayer, block), block, label, kind))
    macs = embedding.hidden * vocabulary
    return [
        *costs,
        LayerCost(
            name="head",
            kind="head",
            weights=blocks[-1].nbytes + tied,
            macs=macs,
            collective="all_gather",
        ),
    ]


def _struct(kind: type[Struct], block: Block) -> Struct:
    return kind.from_buffer_copy(block[: ctypes.sizeof(kind)].tobytes())


def _attention(layer: AttentionLayer, block: Block, label: str, number_bytes: int) -> LayerCost:
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    return LayerCost(
        name=label,
        kind="attention",
        weights=block.nbytes,
        macs=layer.hidden * (2 * queries + 2 * keys),
        seen_macs=2 * queries,
        key_bytes=2 * keys * number_bytes,
    )


def _recurrent(layer: RecurrentLayer, block: Block, label: str) -> LayerCost:
    keys, values = layer.key_heads * layer.key_dim, layer.heads * layer.value_dim
    linear = layer.hidden * (2 * keys + 3 * values + (1 + layer.delta) * layer.heads)
    state = (2 + layer.delta) * values * layer.key_dim  # read, written, and read again
    convolved = layer.kernel * (2 * keys + values)
    macs = linear + state + convolved
    return LayerCost(name=label, kind="recurrent", weights=block.nbytes, macs=macs)


def _feed_forward(layer: FeedForwardLayer, block: Block, label: str, kind: Kind) -> LayerCost:
    one = layer.hidden * layer.wide * (3 if layer.gated else 2)
    if kind != Kind.EXPERTS:
        return LayerCost(name=label, kind="feed_forward", weights=block.nbytes, macs=one)
    experts, chosen = layer.experts, layer.chosen
    return LayerCost(
        name=label,
        kind="experts",
        weights=block.nbytes,
        macs=chosen * one + layer.hidden * experts,
        # Experts that at least one of so many tokens chooses, if all are as likely.
        share=lambda tokens: 1 - (1 - chosen / experts) ** tokens,
    )


def bandwidth(processes: int = 1) -> float:
    """Bytes/s that the kernels' threads read together while `processes` measure it; 0 if memory is
    short."""
    if memory.free_memory() < 4 * READ_BYTES:
        return 0.0
    words = np.ones(READ_BYTES // 8 // processes, np.int64)
    read, pointer = native.library().lite_runner_read, ctypes.c_void_p(words.ctypes.data)
    return words.nbytes / _fastest(lambda: read(pointer, len(words)))


def peak() -> float:
    """Multiply-adds/s of the kernels' float32 products, of as many rows as a step has at most."""
    random = np.random.default_rng(0)
    block = matrix(random.standard_normal((WIDTH, WIDTH), np.float32)).block()
    x, out = np.ones((ROWS, WIDTH), np.float32), np.empty((ROWS, WIDTH), np.float32)
    pointers = [ctypes.c_void_p(one.ctypes.data) for one in (block, x, out)]
    linear = native.library().lite_runner_linear
    return (
        ROWS * WIDTH * WIDTH / _fastest(lambda: linear(pointers[0], pointers[1], ROWS, pointers[2]))
    )


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some rounds."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)
