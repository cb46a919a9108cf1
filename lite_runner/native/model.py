"""A packed model with its KV cache and adapter pools, computed step by step."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lite_runner import architectures, profiler
from lite_runner.architectures import custom_network
from lite_runner.architectures.quantization import CacheType
from lite_runner.architectures.spec import Attention, Decoder, Recurrent
from lite_runner.errors import EnvironmentFault
from lite_runner.native import library
from lite_runner.native.structs import MOST_HEAD_DIM, PANEL, HeadLayer, NativePools, Packed, aligned
from lite_runner.records import dataclass
from lite_runner.weights import HUGE_PAGE

if TYPE_CHECKING:
    from lite_runner.native.peers import Peers
    from lite_runner.recorder import Recorder
    from lite_runner.weights.lora.adapter import LoraSize

BLOCK = 128  # positions of a block of the cache: kChunk in src/layers.h
FEW_BLOCKS = 2  # a slot with no more of them has small pages: it would seldom fill a huge one
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which mmap names from Python 3.13 on


_CACHE_TYPES: dict[CacheType, tuple[int, type[np.generic]]] = {
    "fp32": (0, np.float32),
    "fp16": (1, np.float16),
    "int8": (2, np.int8),
}


def unsupported(model: Decoder) -> list[str]:
    """Reasons why the native kernels do not support a model."""
    if custom_network(model) is not None:
        return [f"{model.architecture} has a custom network"]
    reasons = architectures.unsupported(model, native=True)
    if any(one.experts and one.experts.groups > 64 for one in [model.sparse] if one):
        reasons.append("experts are in more than 64 groups")
    if model.sparse and model.sparse.experts and model.sparse.experts.best_of_group > 2:
        reasons.append("more than the two best experts of a group are added up")
    widest = max(block.attention.head_dim for block in model.blocks)
    if widest > MOST_HEAD_DIM:
        reasons.append(f"head_dim is {widest}, above {MOST_HEAD_DIM}")
    if model.embedding_scale != 1 and (model.learned_positions or model.embedding_norm):
        reasons.append("embeddings are scaled before positions or a norm")
    return reasons


CACHE = ("keys", "values", "key_scales", "value_scales")


_FAILURES = {
    1: "a packed layer of unknown kind",
    2: "a step names tokens, slots, positions, blocks or rows that the model does not have",
}


@dataclass(frozen=True)
class NativeOptions:
    """Sizes and precision of a native model."""

    slots: int  # cache slots
    length: int  # maximum tokens per slot, prompt and generated
    cache: CacheType = "fp32"
    lora: LoraSize | None = None  # adapter slots; None: base model only
    cache_bytes: int | None = None  # of the cache that may be used; None: all of it


@dataclass(frozen=True)
class WindowBlocks:
    """The blocks of layers with windows: see NativeModel.resize."""

    window: int  # tokens that one sees at most
    tables: NDArray[np.int32]
    blocks: int


class BoundLayer(Structure):
    """A layer with its cache and adapter pool (src/layers.h)."""

    __slots__ = ()
    _fields_ = [
        ("block", c_void_p),
        ("cache_type", c_int64),
        *((name, c_void_p) for name in CACHE),
        ("block_bytes", c_int64),
        ("pool", c_void_p),
        ("pool_stride", c_int64),
        ("pool_bfloat16", c_int64),
        ("state", c_void_p),
        ("state_stride", c_int64),
        ("windowed", c_int64),
    ]


class BoundModel(Structure):
    """A model as a step takes it (src/layers.h)."""

    __slots__ = ()
    _fields_ = [
        ("count", c_int64),
        ("layers", POINTER(BoundLayer)),
        ("softcap", c_float),
        ("prefix", c_int64),
        ("capacity", c_int64),
        ("vocabulary", c_int64),
        ("slots", c_int64),
        ("positions", c_int64),
        ("rope_rows", c_int64),
        ("logit_rows", c_int64),
        ("adapter_slots", c_int64),
        ("peers", c_void_p),
        ("first_token", c_int64),
        ("times", c_void_p),
        ("kept", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int64),
        ("blocks", c_int64),
        ("window", c_int64),
        ("window_tables", c_void_p),
        ("window_blocks", c_int64),
    ]


class NativeModel:
    """Computes steps, reading the packed layers where they are: they may be a mapped file."""

    def __init__(
        self, config: Decoder, layers: Iterable[Packed], slots: int, peers: Peers | None = None
    ) -> None:
        """`layers`: as `pack` returns them; `slots`: of the adapter pools; `peers`: the ranks that
        have the rest of each layer."""
        layers = list(layers)
        self._config = config if peers is None else config.shard(peers.share.count)
        self._peers = peers
        self._blocks = [layer.block for layer in layers]  # keeps them alive
        self.adapters = NativePools([layer.adapters for layer in layers], slots)
        self._bound = (BoundLayer * len(layers))()
        self._model = BoundModel(len(layers), self._bound, config.logits_softcap or 0.0)
        self._model.prefix = config.prefix is not None
        self._model.vocabulary, self._model.adapter_slots = config.vocab_size, slots
        if peers is not None:
            self._model.peers = peers.handle
            self._model.first_token = peers.share.index * peers.share.rows(config)
        for bound, block, pool in zip(self._bound, self._blocks, self.adapters.pools, strict=True):
            bound.block = block.ctypes.data
            if pool is not None:
                bound.pool, bound.pool_stride = pool.ctypes.data, pool.shape[1]
                bound.pool_bfloat16 = pool.dtype == np.uint16
        # Of a layer for multi-token prediction: the hidden states of the tokens of the next step
        # [capacity, hidden_size].
        self.joined = _zeros((0, 0), np.float32)
        self._memory: list[BlockMemory] = []
        self._cache: list[CacheArray] = []
        self.states = _zeros((0, 0), np.float32)  # recurrent ones [slots, numbers]
        self.kept_states = self.states  # those behind the tokens that `kept` named
        self.kept = np.zeros(0, np.int32)  # [slots] a token of the next step; -1: none
        self._recorder: Recorder | None = None  # recorder that the layers are timed for
        self._times: Any = None

    def resize(
        self,
        options: NativeOptions,
        capacity: int,
        table: NDArray[np.float32],
        tables: NDArray[np.int32],
        blocks: int,
        windows: WindowBlocks | None = None,
    ) -> None:
        """Reallocate the cache, empty, for these options and steps of `capacity` tokens with a
        rotary `table` of this shape. `tables` [slots, chunks]: the block, of so many, of each
        chunk of a slot's positions, which is looked up in each step; `windows`: those of layers
        with windows, where they have others."""
        self._memory, self._cache = [], []  # before the new ones are allocated
        self._model.tables, self._model.table_width = _pointer(tables), tables.shape[1]
        self._model.blocks = blocks
        self._model.window = 0
        if windows is not None:
            self._model.window, self._model.window_blocks = windows.window, windows.blocks
            self._model.window_tables = _pointer(windows.tables)
        self._number_bytes = np.dtype(_CACHE_TYPES[options.cache][1]).itemsize
        self._model.slots, self._model.capacity = options.slots, capacity
        self._model.positions = options.length
        # Without rotary embeddings a step's rows of the table are not read.
        self._model.rope_rows = len(table) if self._config.rotaries else options.length
        every = _zeros((2 * options.slots, state_floats(self._config)), np.float32)
        self.states, self.kept_states = np.split(every, 2)
        self.kept = np.full(options.slots, -1, np.int32)
        self._model.kept = self.kept.ctypes.data
        size = self.block_bytes(options.cache, windowed=None if windows is None else False)
        self._memory.append(BlockMemory(tables, blocks, size))
        if windows is not None:
            size = self.block_bytes(options.cache, windowed=True)
            self._memory.append(BlockMemory(windows.tables, windows.blocks, size))
        first = 0
        layers = self._bound[1:-1:2]
        if self._config.joins is not None:
            layers = self._bound[2:-1:2]
            self.joined = _zeros((capacity, self._config.hidden_size), np.float32)
            self._bound[1].state = self.joined.ctypes.data
        for bound, block in zip(layers, self._config.blocks, strict=True):
            if block.only == "feed_forward":
                continue
            if block.recurrent is not None:
                bound.state = self.states.ctypes.data + 4 * first
                bound.state_stride = self.states.shape[1]
                first += layer_floats(block.recurrent)
                continue
            bound.cache_type = _CACHE_TYPES[options.cache][0]
            if (lender := block.attention.borrowed) is not None:
                for name in (*CACHE, "block_bytes", "windowed"):
                    setattr(bound, name, getattr(layers[lender], name))
                continue
            bound.windowed = windows is not None and block.attention.most_seen is not None
            memory = self._memory[bound.windowed]
            bound.block_bytes = memory.block_bytes
            for name, rows in _cache_sizes(block.attention, options.cache).items():
                self._cache.append(memory.array(rows))
                setattr(bound, name, self._cache[-1].numbers.ctypes.data)
        self._x = _zeros((capacity, self._config.hidden_size), np.float32)
        self._logits = _zeros((options.slots, self._config.vocab_size), np.float32)

    def run(
        self,
        metadata: NDArray[np.int32],
        table: NDArray[np.float32],
        adapter_slots: NDArray[np.int32] | None,
        rows: int,
    ) -> NDArray[np.float32]:
        """Logits [rows, vocab] of a step with `metadata` (see BatchMetadata), a rotary `table` and
        the adapter slot per token [capacity], None without adapters. They may be overwritten by
        the next step."""
        if rows > len(self._logits):
            self._logits = _zeros((rows, self._config.vocab_size), np.float32)
        self._model.logit_rows = len(self._logits)
        recorder = profiler.recorder
        if recorder is not self._recorder:
            self._time(recorder)
        try:
            failed = library().lite_runner_step(
                byref(self._model),
                _pointer(metadata),
                len(metadata),
                _pointer(table),
                None if adapter_slots is None else _pointer(adapter_slots),
                _pointer(self._x),
                _pointer(self._logits),
            )
        except MemoryError as error:
            if self._peers is None:
                raise
            # The other ranks are in the middle of this step, so this one cannot continue either.
            raise EnvironmentFault(f"out of memory: {error}", "fewer ranks on a machine") from error
        if failed in _FAILURES:
            raise ValueError(_FAILURES[failed])
        if failed:
            assert self._peers is not None
            raise self._peers.lost(failed)
        if recorder is not None:
            recorder.layers(self._times)
        return self._logits[:rows]

    def hidden(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Hidden states [rows, hidden_size] after the final norm, of these tokens of the last
        step."""
        block, x = self._blocks[-1], self._x[rows]
        norm = HeadLayer.from_address(block.ctypes.data).norm
        if not norm.gamma:
            return x

        def weights(offset: int) -> NDArray[np.float32]:
            # The logits' scale is part of them.
            found = block[offset : offset + 4 * x.shape[1]].view(np.float32)
            return found * np.float32(self._config.logits_scaling)

        if norm.centred:
            x = x - x.mean(axis=1, keepdims=True)
        scale = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(norm.epsilon))
        scaled: NDArray[np.float32] = x / scale * weights(norm.gamma)
        return scaled + weights(norm.beta) if norm.centred else scaled

    def further(self, config: Decoder, layers: Sequence[Packed]) -> NativeModel:
        """A model of `layers` between the embedding and the head of this one, which has to stay."""
        own, head = self._blocks[-1], layers[-1].block
        offset = HeadLayer.from_address(own.ctypes.data).matrix_offset
        last = aligned(head.nbytes)
        last[:] = head
        if offset:  # from its own address, as offsets are
            matrix = own.ctypes.data + offset - last.ctypes.data
            HeadLayer.from_address(last.ctypes.data).matrix_offset = matrix
        every = [self._blocks[0], *(layer.block for layer in layers[:-1]), last]
        return NativeModel(config, [Packed(block, None) for block in every], 0)

    def _time(self, recorder: Recorder | None) -> None:
        """Time the layers for a recorder from now on; None: stop."""
        self._recorder = recorder
        self._times = self._model.times = None
        if recorder is not None:
            # Not imported by runs without a profile.
            from lite_runner.native.costs import layer_costs

            vocabulary = self._config.vocab_size
            peers = self._peers
            self._times = recorder.times_of(
                layer_costs(self._blocks, vocabulary, self._number_bytes),
                waiting_known=peers is None or peers.all_gather is None,
            )
            self._model.times = addressof(self._times)

    def block_bytes(self, cache: CacheType, *, windowed: bool | None = None) -> int:
        """Bytes of a block, of the layers with windows, or without, or all (None)."""
        layers = self._config.cached
        if windowed is not None:
            layers = tuple(one for one in layers if (one.most_seen is not None) == windowed)
        sizes = [size for one in layers for size in _cache_sizes(one, cache).values()]
        return BLOCK * sum(one.position_bytes for one in sizes)

    def copy_block(self, tables: NDArray[np.int32], source: int, target: int) -> None:
        """Copy a block of the cache, one of these `tables`."""
        for memory in self._memory:
            if memory.tables is tables:
                memory.blocks[target] = memory.blocks[source]

    def use_huge_pages(self, tables: NDArray[np.int32], slot: int, start: int, end: int) -> None:
        """Map the blocks of these positions of a slot in huge pages, if it has more than a few:
        attention reads all of them in each step."""
        if np.count_nonzero(tables[slot] >= 0) > FEW_BLOCKS:
            for memory in self._memory:
                if memory.tables is tables:
                    memory.use_huge_pages(tables[slot, start // BLOCK : -(-end // BLOCK)])

    def bytes_of(self, count: int) -> int:
        """Bytes of so many positions of a slot."""
        return sum(array.positions(0, 0, count).nbytes for array in self._cache)

    def has_positions(self, slot: int, start: int) -> bool:
        """True if a slot has the block of a position in all layers."""
        return all(array.tables[slot, start // BLOCK] >= 0 for array in self._cache)

    def read_positions(self, slot: int, start: int, count: int) -> NDArray[np.uint8]:
        """A copy of a slot's cache at positions within a block; `start` and `count` are multiples
        of PANEL."""
        parts = self._positions(slot, start, count)
        return np.concatenate(
            [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in parts]
        )

    def write_positions(self, slot: int, start: int, count: int, block: NDArray[np.uint8]) -> None:
        """Write what `read_positions` returned."""
        at = 0
        for part in self._positions(slot, start, count):
            numbers = block[at : at + part.nbytes].view(part.dtype)
            part[...] = numbers.reshape(part.shape)
            at += part.nbytes

    def _positions(self, slot: int, start: int, count: int) -> list[NDArray[np.generic]]:
        return [
            array.positions(int(array.tables[slot, start // BLOCK]), start % BLOCK, count)
            for array in self._cache
        ]

    def write_keys(self, blocks: Sequence[int], numbers: NDArray[np.float32]) -> None:
        """Write keys and values [layers, 2, kv_heads, tokens, head_dim] from the start of these
        blocks on."""
        tokens = numbers.shape[3]
        whole = np.zeros((*numbers.shape[:3], -(-tokens // PANEL) * PANEL, numbers.shape[4]))
        whole[:, :, :, :tokens] = numbers
        scales = np.abs(whole).max(-1) / 127
        if self._number_bytes == 1:
            whole = np.rint(whole / np.where(scales, scales, 1)[..., None])
        parts = []
        for (keys, values), (key_scales, value_scales) in zip(whole, scales, strict=True):
            heads, count, dim = keys.shape
            wide = np.zeros((heads, count, -(-dim // PANEL) * PANEL))
            wide[:, :, :dim] = values
            parts += [
                keys.reshape(heads, -1, PANEL, dim).swapaxes(2, 3),
                wide.reshape(heads, count, -1, PANEL).swapaxes(1, 2),
                *((key_scales, value_scales) if self._number_bytes == 1 else ()),
            ]
        for index, block in enumerate(blocks):
            start, end = index * BLOCK, min(whole.shape[3], (index + 1) * BLOCK)
            for array, part in zip(self._cache, parts, strict=True):
                place = array.positions(block, 0, end - start)
                place[...] = part.reshape(len(place), -1, place.shape[2])[:, start:end]

    def close(self) -> None:
        """Release the memory."""
        self._blocks, self._memory, self._cache = [], [], []
        if self._peers is not None:
            self._peers.close()


def layer_floats(recurrent: Recurrent) -> int:
    """Numbers of the state of a slot in a layer: see RecurrentLayer in src/layers.h."""
    panels = -(-recurrent.value_dim // PANEL)
    matrices = recurrent.heads * panels * recurrent.key_dim * PANEL
    return (recurrent.kernel - 1) * recurrent.channels + matrices


def state_floats(model: Decoder) -> int:
    """Numbers of the recurrent state of a slot, of all layers."""
    every = (block.recurrent for block in model.blocks)
    return sum(layer_floats(one) for one in every if one is not None)


@dataclass(frozen=True)
class CacheRows:
    """Rows of a block in an array of the cache."""

    rows: int
    width: int  # numbers of a position in a row
    dtype: type[np.generic]

    @property
    def position_bytes(self) -> int:
        return self.rows * self.width * np.dtype(self.dtype).itemsize


def _cache_sizes(given: Attention, cache: CacheType) -> dict[str, CacheRows]:
    """Of a layer's keys, values and their scales: see Cache in src/layers.h."""
    heads, dim, dtype = given.kv_heads, given.head_dim, _CACHE_TYPES[cache][1]
    sizes = {
        "keys": CacheRows(heads, dim, dtype),
        "values": CacheRows(heads * -(-dim // PANEL), PANEL, dtype),
    }
    if cache == "int8":
        sizes |= dict.fromkeys(CACHE[2:], CacheRows(heads, 1, np.float32))
    return sizes


@dataclass(frozen=True)
class CacheArray:
    """Keys, values or scales of a layer in all blocks, [blocks, rows, BLOCK, width]."""

    tables: NDArray[np.int32]  # blocks of the slots
    numbers: NDArray[np.generic]

    def positions(self, block: int, start: int, count: int) -> NDArray[np.generic]:
        """A block at positions, as it is in memory; keys in panels of PANEL of them."""
        return self.numbers[block, :, start : start + count]


class BlockMemory:
    """Memory of a cache's blocks: the keys and values of all layers side by side in each, so that
    huge pages suit short texts too.

    Addresses are reserved for all blocks; the system allocates pages as they are written.
    """

    def __init__(self, tables: NDArray[np.int32], blocks: int, block_bytes: int) -> None:
        """`tables`: the blocks of the slots."""
        self.tables, self.block_bytes = tables, block_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        # Huge pages begin and end at multiples of their size.
        self._map = mmap.mmap(-1, blocks * block_bytes + 2 * HUGE_PAGE, flags=flags)
        whole = np.frombuffer(self._map, np.uint8)
        self._start = -whole.ctypes.data % HUGE_PAGE
        self._used = 0  # bytes of a block that are given to arrays
        self.blocks = whole[self._start :][: blocks * block_bytes].reshape(blocks, block_bytes)

    def array(self, size: CacheRows) -> CacheArray:
        """The next bytes of each block."""
        item = np.dtype(size.dtype).itemsize
        shape = len(self.blocks), size.rows, BLOCK, size.width
        strides = self.block_bytes, BLOCK * size.width * item, size.width * item, item
        first = self._start + self._used
        self._used += BLOCK * size.position_bytes
        return CacheArray(self.tables, np.ndarray(shape, size.dtype, self._map, first, strides))

    def use_huge_pages(self, blocks: NDArray[np.int32]) -> None:
        """Map what of these blocks (-1: none) is not yet in memory in huge pages, if Linux can."""
        for block in blocks[blocks >= 0].tolist():  # a product of NumPy's integers has 32 bits
            start = block * self.block_bytes // HUGE_PAGE * HUGE_PAGE
            end = -(-(block + 1) * self.block_bytes // HUGE_PAGE) * HUGE_PAGE
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE, self._start + start, end - start)


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Aligned; its pages are allocated when they are first written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return aligned(size)[:size].view(dtype).reshape(shape)


def _pointer(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
