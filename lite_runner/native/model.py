"""A packed model with its KV cache and adapter pools, computed step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner import profiler
from lite_runner.architectures.spec import Decoder
from lite_runner.config.quantization import CacheType
from lite_runner.errors import EnvironmentFault
from lite_runner.native import library
from lite_runner.native.lora_pool import LoraSize, NativePools
from lite_runner.native.packed_model import Packed
from lite_runner.native.peers import LOST, Peers
from lite_runner.native.structs import PANEL, aligned
from lite_runner.profiler import LayerTime, Recorder
from lite_runner.records import dataclass

_CHUNK = 128  # keys that are reduced together: the cache length is a multiple


_CACHE_TYPES: dict[CacheType, tuple[int, type[np.generic]]] = {
    "fp32": (0, np.float32),
    "fp16": (1, np.float16),
    "int8": (2, np.int8),
}


# Axis of the positions in a cache, and how many there are to a step of it: see _cache_shapes.
_POSITIONS = {"keys": (1, PANEL), "values": (2, 1), "key_scales": (1, 1), "value_scales": (1, 1)}


_FAILURES = {
    1: "a packed layer of unknown kind",
    2: "a step names tokens, slots, positions or rows that the model does not have",
}


CACHE = ("keys", "values", "key_scales", "value_scales")


@dataclass(frozen=True)
class NativeOptions:
    """Sizes and precision of a native model."""

    slots: int  # cache slots
    length: int  # maximum tokens per slot, prompt and generated
    cache: CacheType = "fp32"
    lora: LoraSize | None = None  # adapter slots; None: base model only


class BoundLayer(Structure):
    """A layer with its cache and adapter pool (src/layers.h)."""

    __slots__ = ()
    _fields_ = [
        ("block", c_void_p),
        ("cache_type", c_int64),
        ("cache_length", c_int64),
        *((name, c_void_p) for name in CACHE),
        ("pool", c_void_p),
        ("pool_stride", c_int64),
        ("pool_bfloat16", c_int64),
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
        ("times", POINTER(LayerTime)),
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
        self._caches: list[NDArray[np.generic]] = []
        self._axes: list[tuple[int, int]] = []  # of each: see _POSITIONS
        self._recorder: Recorder | None = None  # that the layers are timed for
        self._times: Any = None

    def resize(self, options: NativeOptions, capacity: int, table: NDArray[np.float32]) -> None:
        """Reallocate the caches, empty, for these options and steps of `capacity` tokens with a
        rotary `table` of this shape."""
        shapes = _cache_shapes(self._config, options.slots, options.length, options.cache)
        self._slots, self._caches, self._axes = options.slots, [], []
        self._number_bytes = np.dtype(_CACHE_TYPES[options.cache][1]).itemsize
        self._model.slots, self._model.capacity = options.slots, capacity
        self._model.positions = options.length
        # Without rotary embeddings a step's rows of the table are not read.
        self._model.rope_rows = len(table) if self._config.rotaries else options.length
        for bound in self._bound[1:-1:2]:
            bound.cache_type = _CACHE_TYPES[options.cache][0]
            bound.cache_length = _cached_positions(options.length)
            for name, (shape, dtype) in shapes.items():
                array = _zeros(shape, dtype)
                setattr(bound, name, array.ctypes.data)
                if array.size > 1:
                    self._caches.append(array)
                    self._axes.append(_POSITIONS[name])
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
            # The other ranks are in the middle of this step, so that this one cannot go on either.
            raise EnvironmentFault(f"out of memory: {error}", "fewer ranks on a machine") from error
        if failed >= LOST:
            assert self._peers is not None
            raise self._peers.lost(failed - LOST)
        if failed:
            raise ValueError(_FAILURES[failed])
        if recorder is not None:
            recorder.layers(self._times)
        return self._logits[:rows]

    def _time(self, recorder: Recorder | None) -> None:
        """Time the layers for a recorder from now on; None: no more."""
        self._recorder, self._times = recorder, None
        if recorder is not None:
            from lite_runner.native.costs import layer_costs  # not for runs that nobody records

            vocabulary = self._config.vocab_size
            self._times = recorder.times_of(
                layer_costs(self._blocks, vocabulary, self._number_bytes)
            )
        self._model.times = self._times

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cache slot sources[i] to targets[i]; all are read before any is written."""
        for cache in self._caches:
            slots = cache.reshape(self._slots, -1)
            slots[list(targets)] = slots[list(sources)]

    def bytes_of(self, count: int) -> int:
        """Bytes of so many positions of a slot."""
        return sum(view.nbytes for view in self._views(0, 0, count))

    def read_positions(self, slot: int, start: int, count: int) -> NDArray[np.uint8]:
        """A copy of what a slot has at positions; `start` and `count` are multiples of PANEL."""
        views = self._views(slot, start, count)
        return np.concatenate(
            [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in views]
        )

    def write_positions(self, slot: int, start: int, count: int, block: NDArray[np.uint8]) -> None:
        """Write what `read_positions` gave."""
        at = 0
        for view in self._views(slot, start, count):
            part = block[at : at + view.nbytes]
            view[...] = part.view(view.dtype).reshape(view.shape)
            at += view.nbytes

    def _views(self, slot: int, start: int, count: int) -> Iterator[NDArray[np.generic]]:
        """Of each cache the positions of a slot."""
        for cache, (axis, unit) in zip(self._caches, self._axes, strict=True):
            rows = len(cache) // self._slots
            places = slice(start // unit, (start + count) // unit)
            mine = cache[slot * rows : (slot + 1) * rows]
            yield mine[(slice(None),) * axis + (places,)]

    def close(self) -> None:
        """Release the memory."""
        self._blocks, self._caches, self._axes = [], [], []
        if self._peers is not None:
            self._peers.close()


def _cached_positions(length: int) -> int:
    """Cache positions per slot for rows of at most `length` tokens."""
    return -(-length // _CHUNK) * _CHUNK


def _cache_shapes(
    model: Decoder, slots: int, length: int, cache: CacheType
) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    """Shape and type of a layer's keys, values and their scales, by name; `length`: maximum tokens
    per slot. The first axis is slot-major.

    Keys: [slots * kv_heads, length / 32, head_dim, 32]; values: [slots * kv_heads, head_dim / 32,
    length, 32]; their scales, with int8: [slots * kv_heads, length], else [1, 1].
    """
    rows, dim, dtype = slots * model.n_kv_heads, model.head_dim, _CACHE_TYPES[cache][1]
    positions = _cached_positions(length)
    scaled = (rows, positions) if cache == "int8" else (1, 1)
    return {
        "keys": ((rows, positions // PANEL, dim, PANEL), dtype),
        "values": ((rows, -(-dim // PANEL), positions, PANEL), dtype),
        "key_scales": (scaled, np.float32),
        "value_scales": (scaled, np.float32),
    }


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Aligned; its pages are allocated when they are first written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return aligned(size)[:size].view(dtype).reshape(shape)


def _pointer(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
