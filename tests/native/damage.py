"""Which words of a packed layer the tests change, and to what."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lite_runner.native import structs
from lite_runner.native.layout import Block
from lite_runner.native.structs import Kind

_MATRICES = ("table", "positions", "query_key_value", "projection", "up", "down", "matrix_offset")


def words(block: Block, index: int, count: int) -> list[int]:
    """Offsets of the words of a layer's struct and of its matrices'; layer `index` of `count`."""
    kinds: dict[int, type[ctypes.Structure]] = {
        Kind.ATTENTION: structs.AttentionLayer,
        Kind.FEED_FORWARD: structs.FeedForwardLayer,
        Kind.EXTENDED_ATTENTION: structs.ExtendedAttentionLayer,
        Kind.GENERAL_ATTENTION: structs.GeneralAttentionLayer,
        Kind.GENERAL_FEED_FORWARD: structs.GeneralFeedForwardLayer,
        Kind.EXPERTS: structs.ExpertsLayer,
    }
    whole = block.view(np.int64)
    # Behind a plain head are zeros.
    capped = whole[ctypes.sizeof(structs.HeadLayer) // 8] != 0
    head = structs.CappedHeadLayer if capped else structs.HeadLayer
    kind = {0: structs.EmbeddingLayer, count - 1: head}.get(index)
    fields = (kind or kinds[int(whole[0])]).from_buffer_copy(block.data)
    found = list(range(0, ctypes.sizeof(fields), 8))
    if isinstance(fields, structs.ExpertsLayer):
        return found + _words_of_experts(whole, fields)
    extended = getattr(fields, "extended", fields)
    plain = getattr(extended, "plain", extended)
    starts = [getattr(plain, name) for name in _MATRICES if getattr(plain, name, 0)]
    for start in starts:
        found += _words_of_matrix(whole, start)
    return found


def _words_of_matrix(whole: NDArray[np.int64], start: int) -> list[int]:
    """Words of a matrix, or of a joined one and its parts."""
    if whole[start // 8] != structs.Format.JOINED:
        return list(range(start, start + ctypes.sizeof(structs.Matrix), 8))
    fields = structs.JoinedMatrix.from_buffer_copy(whole.data.cast("B"), start)
    found = list(range(start, start + ctypes.sizeof(fields), 8))
    for part in fields.parts[: fields.count]:
        found += _words_of_matrix(whole, start + part)
    return found


def _words_of_experts(whole: NDArray[np.int64], fields: structs.ExpertsLayer) -> list[int]:
    """Words of the router, and of the matrices of each expert and of where they are."""
    found, starts = [], [fields.router]
    for table in (fields.general.plain.up, fields.general.plain.down):
        found += range(table, table + 8 * fields.experts, 8)
        starts += whole[table // 8 : table // 8 + fields.experts].tolist()
    for start in starts:
        found += _words_of_matrix(whole, start)
    return found


def other_words(word: int, rng: np.random.Generator) -> Iterator[int]:
    """What damage may make of a word."""
    small = int(rng.integers(1, 1 << 20))
    whole = int(rng.integers(-(1 << 63), 1 << 63))
    near = (word + 1, word - 1, word + 64, word - 64, 2 * word, word // 2, -word)
    for one in (0, -1, 1, *near, (1 << 31) - 1, (1 << 63) - 1, -(1 << 63), small, whole):
        if one != word and -(1 << 63) <= one < 1 << 63:
            yield one
