"""The operators, called by ctypes, with each set of instructions."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.native import matrices, packing
from lite_runner.native.model import CACHE, BoundLayer, BoundModel
from lite_runner.native.structs import Block, NormValues
from tests.native.in_numpy import BASE, NO_ROPE, Floats

Words = NDArray[np.int32]
Pool = NDArray[Any]  # of adapters
NO_CACHE = np.zeros(0, np.int8)
NO_TABLES = np.zeros(1 << 12, np.int32)  # of layers without a cache


class Operators:
    """A library of operators."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.lite_runner_instructions.restype = ctypes.c_char_p
        self.set_threads = self._library.lite_runner_set_threads

    def choose(self, instructions: str) -> bool:
        """Use these instructions from here on; False if this machine lacks them."""
        return bool(self._library.lite_runner_choose(instructions.encode()))

    def chosen(self) -> str:
        name: bytes = self._library.lite_runner_instructions()
        return name.decode()

    def linear(self, block: NDArray[np.uint8], out: int, x: Floats) -> Floats:
        """x [rows, in] times a packed matrix [out, in]."""
        assert x.flags.c_contiguous and x.dtype == np.float32
        result = np.full((len(x), out), np.nan, np.float32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (block, x, result)]
        self._library.lite_runner_linear(
            *pointers[:2], ctypes.c_int64(len(x)), ctypes.c_void_p(result.ctypes.data)
        )
        return result

    def embedding(
        self, block: Block, words: Words, shape: tuple[int, int], *pool: Pool, places: Words = BASE
    ) -> Floats:
        """Hidden states of the `shape` [capacity, hidden] of a step's tokens."""
        layers = [(block, (), *pool), (_plain_head(shape[1]), ())]
        return self.step(layers, words, shape, places=places)[0]

    def layer(
        self,
        block: Block,
        words: Words,
        x: Floats,
        *pool: Pool,
        cache: NDArray[Any] = NO_CACHE,
        tables: Words = NO_TABLES,
        rope: Floats = NO_ROPE,
        places: Words = BASE,
    ) -> Floats:
        """Hidden states behind an attention or feed-forward layer; `cache`
        [blocks]: of arrays by CACHE; `tables` [slots, chunks]: the blocks of each slot."""
        words, first = _looked_up(x, words)
        layers = [(first, ()), (block, cache, *pool), (_plain_head(x.shape[1]), ())]
        return self.step(layers, words, x.shape, tables=tables, rope=rope, places=places)[0]

    def head(
        self, block: Block, words: Words, x: Floats, vocab: int, *pool: Pool, places: Words = BASE
    ) -> Floats:
        """Logits [rows, vocab] of those rows of x that the step wants."""
        words, first = _looked_up(x, words)
        layers = [(first, ()), (block, (), *pool)]
        return self.step(layers, words, x.shape, places=places, logits=(words[1], vocab))[1]

    def step(
        self,
        layers: Sequence[tuple[Any, ...]],  # of each its block, its cache, its adapters if any
        words: Words,
        shape: tuple[int, int],
        *,
        tables: Words = NO_TABLES,
        rope: Floats = NO_ROPE,
        places: Words = BASE,
        logits: tuple[int, int] = (0, 1),
    ) -> tuple[Floats, Floats]:
        """Hidden states of the `shape` behind embedding and layers, and `logits` of that shape.
        Raises ValueError for a step that is not computed."""
        bound = (BoundLayer * len(layers))()
        for into, (block, cache, *pools) in zip(bound, layers, strict=True):
            into.block = block.ctypes.data
            for name in CACHE if len(cache) else ():
                into.cache_type = ("float32", "float16", "int8").index(cache["keys"].dtype.name)
                setattr(into, name, cache[name].ctypes.data)
                into.block_bytes = cache.itemsize
            for pool in pools:
                into.pool, into.pool_stride = pool.ctypes.data, pool.shape[1]
                into.pool_bfloat16 = pool.dtype == np.uint16
        model = BoundModel(len(layers), bound, 0.0, capacity=shape[0], logit_rows=logits[0])
        for name in ("vocabulary", "slots", "positions", "rope_rows", "adapter_slots", "blocks"):
            setattr(model, name, 1 << 31)  # steps of the tests are within their model
        model.tables = tables.ctypes.data
        model.table_width = 0 if tables is NO_TABLES else tables.shape[1]
        x, found = (np.full(size, np.nan, np.float32) for size in (shape, logits))
        arrays = words, rope, None if places is BASE else places, x, found
        assert all(one is None or one.flags.c_contiguous for one in arrays)
        pointers = [one if one is None else ctypes.c_void_p(one.ctypes.data) for one in arrays]
        size = ctypes.c_int64(len(words))
        if self._library.lite_runner_step(ctypes.byref(model), pointers[0], size, *pointers[1:]):
            raise ValueError("not computed")
        return x, found


@functools.cache
def _plain_head(hidden: int) -> Block:
    """One without wanted logits."""
    norm = NormValues(np.ones(hidden, np.float32), None, 1.0)
    return packing.head(None, norm, None, hidden=hidden).block()


def _looked_up(x: Floats, words: Words) -> tuple[Words, Block]:
    """The step with the live rows of x as its tokens, and an embedding that has them."""
    count = words[0]
    words = words.copy()
    words[2 : 2 + count] = np.arange(count)
    table = matrices.matrix(x[: max(count, 1)])
    return words, packing.embedding(table, None, None, None, hidden=x.shape[1]).block()


# The test of the sanitizers runs the others again with a library of its own, which is slow.
SANITIZED = os.environ.get("SANITIZED_OPERATORS")
if SANITIZED:
    settings.register_profile("sanitized", parent=settings(), max_examples=6)
    settings.load_profile("sanitized")
    native.LIBRARY = Path(SANITIZED)
OPERATORS = Operators(native.LIBRARY)
KERNELS = ("portable", "avx2", "avxvnni", "avx512", "amx", "dotprod")
INSTRUCTIONS = [name for name in KERNELS if OPERATORS.choose(name)]
# Between portable and the widest that there is, whose text they share: of their own they have
# a dozen instructions, from registers to registers.
UNSANITIZED = [
    name for name in ("avx2", "avxvnni") if name in INSTRUCTIONS and name != INSTRUCTIONS[-1]
]
if SANITIZED:
    INSTRUCTIONS = [name for name in INSTRUCTIONS if name not in UNSANITIZED]


@pytest.fixture(scope="module", params=INSTRUCTIONS)
def operators(request: pytest.FixtureRequest) -> Operators:
    assert OPERATORS.choose(request.param)
    OPERATORS.set_threads(2)
    return OPERATORS
