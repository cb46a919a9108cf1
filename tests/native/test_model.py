"""A step names only what the model has: whatever else its metadata says is an error, not memory."""

from __future__ import annotations

import ctypes
import mmap
import re
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lite_runner.backends import BASE, Row
from lite_runner.backends.native.backend import BatchMetadata, NativeBackend, empty_metadata
from lite_runner.config.argv import parse
from lite_runner.native.model import BLOCK, BlockMemory, CacheRows, NativeModel, NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.lora.adapter import LoraSize
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.conftest import Reference

SLOTS, LENGTH, CAPACITY, ROWS, ADAPTERS = 2, 24, 6, 3, 2


class Opened:
    """A tiny model ready for steps of CAPACITY tokens with ROWS rows of logits."""

    def __init__(self, case: str) -> None:
        known = Reference(case)
        self.config = known.config
        weights = QuantizedWeights(known.tensors(), self.config)
        queries = (
            name for name in known.tensors() if re.search(r"(wq|dense1|query)\.weight", name)
        )
        size = LoraSize(ADAPTERS, rank=4, targets=frozenset(queries))
        layers = pack(self.config, weights, size)
        self.model = NativeModel(self.config, layers, ADAPTERS)
        self.table = BatchMetadata(self.config, LENGTH, CAPACITY).table
        options, tables = NativeOptions(SLOTS, LENGTH, lora=size), np.arange(SLOTS, dtype=np.int32)
        self.model.resize(options, CAPACITY, self.table, tables[:, None], SLOTS)

    def fits(self, metadata: NDArray[np.int32], places: NDArray[np.int32] | None) -> bool:
        """True if a step is within the model, by the meaning of its words (Step in layers.h)."""
        count, wanted = metadata[:2]
        if not (0 <= count <= CAPACITY and 0 <= wanted <= ROWS):
            return False
        ends = [self.config.vocab_size, SLOTS, LENGTH]
        ends.append(len(self.table) if self.config.rotaries else LENGTH)
        columns = list(metadata[2 : 2 + 4 * CAPACITY].reshape(4, CAPACITY)[:, :count])
        if self.config.prefix is not None:
            columns.append(metadata[-CAPACITY:][:count])
            ends.append(LENGTH)
        rows = metadata[2 + 4 * CAPACITY :][:wanted]
        return (
            all(((one >= 0) & (one < end)).all() for one, end in zip(columns, ends, strict=True))
            and bool(((rows >= 0) & (rows < count)).all())
            and (places is None or bool(((places >= BASE) & (places < ADAPTERS))[:count].all()))
        )


MODELS = ["llama", "gpt2", "gemma3", "chatglm_6b", "qwen3_next", "granitemoehybrid"]


@pytest.fixture(scope="module", params=MODELS)
def opened(request: pytest.FixtureRequest) -> Opened:
    return Opened(request.param)


WORDS = st.integers(-2, 30) | st.sampled_from([2**31 - 1, -(2**31), 127, 128, 129])


@given(data=st.data())
def test_a_step_beyond_the_model_is_an_error(opened: Opened, data: Any) -> None:
    metadata = empty_metadata(CAPACITY, ROWS, opened.config.prefix)
    metadata[0] = data.draw(st.integers(-1, CAPACITY + 1))
    metadata[1] = data.draw(st.integers(-1, ROWS + 1))
    for place in data.draw(st.lists(st.integers(2, len(metadata) - 1), max_size=6)):
        metadata[place] = data.draw(WORDS)
    places = None
    if data.draw(st.booleans()):
        drawn = data.draw(st.lists(st.integers(-2, ADAPTERS), min_size=CAPACITY, max_size=CAPACITY))
        places = np.array(drawn, np.int32)
    if opened.fits(metadata, places):
        logits = opened.model.run(metadata, opened.table, places, ROWS)
        assert np.isfinite(logits[: metadata[1]]).all()
    else:
        with pytest.raises(ValueError, match="does not have"):
            opened.model.run(metadata, opened.table, places, ROWS)


def test_metadata_that_is_cut_short_is_an_error(opened: Opened) -> None:
    metadata = empty_metadata(CAPACITY, 0, opened.config.prefix)
    with pytest.raises(ValueError, match="does not have"):
        opened.model.run(metadata[:-1].copy(), opened.table, None, 0)


def test_a_step_without_memory_is_a_memory_error() -> None:
    """It would end the process as std::bad_alloc. The next step works. In a process of its own:
    the heap of this one may have that much memory, which earlier tests freed."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(step_without_memory).result()


def step_without_memory() -> None:
    sizes = ("num_layers=1", "intermediate_size=40000", "seq_length=512")
    line = ["model=tiny_llama", *(f"model.model_config.{size}" for size in sizes)]
    config = resolve(parse([*line, "predict_data=x"], heads()))[0].model_config()
    assert config is not None
    packed = pack(config, QuantizedWeights(random_checkpoint(config, 1), config))
    found = NativeBackend(config, packed, NativeOptions(1, 512))
    # Their hidden values take 82 MB: glibc has up to 64 MB of addresses in reserve.
    tokens = np.arange(512, dtype=np.int32) % config.vocab_size
    wanted = found.forward([Row(0, tokens[:4], 0)]).copy()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms, limit[1]))
    try:
        with pytest.raises(MemoryError, match="native kernels"):
            found.forward([Row(0, tokens, 0)])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    np.testing.assert_array_equal(found.forward([Row(0, tokens[:4], 0)]), wanted)


def test_memory_of_blocks_is_taken_as_they_are_written() -> None:
    rows = CacheRows(4, 64, np.float16)  # 64 KiB in a block, and another layer's as much
    memory = BlockMemory(np.zeros((1, 1), np.int32), 1000, 2 * BLOCK * rows.position_bytes)
    array, other = memory.array(rows), memory.array(rows)
    pages = -(-memory.blocks.nbytes // mmap.PAGESIZE)

    def taken() -> int:
        """MiB that the system has given to it."""
        resident = (ctypes.c_ubyte * pages)()
        start = ctypes.c_void_p(memory.blocks.ctypes.data)
        size = ctypes.c_size_t(pages * mmap.PAGESIZE)
        assert ctypes.CDLL(None).mincore(start, size, resident) == 0
        return int(np.count_nonzero(np.frombuffer(resident, np.uint8) & 1)) * mmap.PAGESIZE >> 20

    for block in range(32):
        array.positions(block, 0, BLOCK)[...] = block
        other.positions(block, 0, BLOCK)[...] = -block
    assert 4 <= taken() <= 6  # huge pages round it
    assert (array.positions(31, 32, 64) == 31).all() and (other.numbers[31] == -31).all()
    memory.use_huge_pages(np.array([-1, 992], np.int32))  # 62 of 2 MiB are before it
    array.positions(992, 0, 1)[...] = 1
    smaps, huge = Path("/proc/self/smaps").read_text(), Path("/sys/kernel/mm/transparent_hugepage")
    start = memory.blocks[992].ctypes.data
    of_block = re.search(f"^{start:x}-{start + (2 << 20):x} .*?^VmFlags:(.*?)$", smaps, re.M | re.S)
    assert (of_block is not None and " hg" in of_block[1]) == huge.exists()
    assert taken() <= 8


def test_huge_pages_of_a_block_behind_2_gib() -> None:
    memory = BlockMemory(np.zeros((1, 1), np.int32), 600, 8 << 20)  # addresses alone
    memory.use_huge_pages(np.array([599], np.int32))
    start = memory.blocks[599].ctypes.data
    found = re.search(f"^{start:x}-", Path("/proc/self/smaps").read_text(), re.M)
    assert (found is not None) == Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_a_step_reads_blocks_that_there_are() -> None:
    opened = Opened("llama")
    tables = np.array([[0, 1, 2], [2, -1, 1]], np.int32)
    table = BatchMetadata(opened.config, 300, CAPACITY).table
    opened.model.resize(NativeOptions(SLOTS, 300), CAPACITY, table, tables, 2)
    for slot, position, there in ((0, 255, 1), (0, 256, 0), (1, 0, 0), (1, 299, 0)):
        metadata = empty_metadata(CAPACITY, 0)
        metadata[0] = 1
        metadata[[2 + CAPACITY, 2 + 2 * CAPACITY]] = slot, position
        if there:
            opened.model.run(metadata, table, None, 0)
        else:
            with pytest.raises(ValueError, match="blocks"):
                opened.model.run(metadata, table, None, 0)
