"""A packed model with its KV cache and adapter pools, computed step by step without MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.config.quantization import CacheType
from lite_runner.native import library
from lite_runner.native.kv_cache import cache_shapes, cached_positions
from lite_runner.native.layout import aligned
from lite_runner.native.lora_pool import LoraSize, NativePools
from lite_runner.native.packed_model import Packed
from lite_runner.records import dataclass

_CACHE_TYPES: dict[CacheType, int] = {"fp32": 0, "fp16": 1, "int8": 2}
_CACHE = ("keys", "values", "key_scales", "value_scales")


@dataclass(frozen=True)
class NativeOptions:
    """Sizes and precision of a native model."""

    slots: int  # cache slots
    length: int  # maximum tokens per slot, prompt and generated
    cache: CacheType = "fp32"
    rounded_input: bool = False  # see matrices.matrix
    lora: LoraSize | None = None  # adapter slots; None: base model only
    dequantize: bool = False  # quant=none: a quantized file's weights become float32


class _Layer(Structure):
    """BoundLayer in src/layers.h."""

    __slots__ = ()
    _fields_ = [
        ("block", c_void_p),
        ("cache_type", c_int64),
        ("cache_length", c_int64),
        *((name, c_void_p) for name in _CACHE),
        ("pool", c_void_p),
        ("pool_stride", c_int64),
        ("pool_bfloat16", c_int64),
    ]


class _Model(Structure):
    """BoundModel in src/layers.h."""

    __slots__ = ()
    _fields_ = [("count", c_int64), ("layers", POINTER(_Layer)), ("softcap", c_float)]


class NativeModel:
    """See `lite_runner.backends.native.Executor`. A step reads the packed layers where they are, so
    they may be a mapped file."""

    name = "native"
    compile_s = 0.0

    def __init__(self, config: Decoder, layers: Sequence[Packed], slots: int) -> None:
        """`layers`: as `pack` returns them; `slots`: of the adapter pools."""
        self._config = config
        self._blocks = [layer.block for layer in layers]  # keeps them alive
        self.adapters = NativePools([layer.adapters for layer in layers], slots)
        self._bound = (_Layer * len(layers))()
        self._model = _Model(len(layers), self._bound, config.logits_softcap or 0.0)
        for bound, block, pool in zip(self._bound, self._blocks, self.adapters.pools, strict=True):
            bound.block = block.ctypes.data
            if pool is not None:
                bound.pool, bound.pool_stride = pool.ctypes.data, pool.shape[1]
                bound.pool_bfloat16 = pool.dtype == np.uint16
        self._caches: list[NDArray[np.generic]] = []

    def resize(self, options: NativeOptions, capacity: int, table: NDArray[np.float32]) -> None:
        """See Executor."""
        shapes = cache_shapes(self._config, options.slots, options.length, options.cache)
        self._slots, self._capacity, self._caches = options.slots, capacity, []
        for bound in self._bound[1:-1:2]:
            bound.cache_type = _CACHE_TYPES[options.cache]
            bound.cache_length = cached_positions(options.length)
            for name, (shape, dtype) in shapes.items():
                array = _zeros(shape, dtype)
                setattr(bound, name, array.ctypes.data)
                if array.size > 1:
                    self._caches.append(array)
        self._x = _zeros((capacity, self._config.hidden_size), np.float32)
        self._logits = _zeros((options.slots, self._config.vocab_size), np.float32)

    def prepare(self) -> None:
        """Nothing: there is no graph to compile."""

    def rows(self, wanted: int, most: int) -> int:
        """See Executor."""
        return wanted

    def run(
        self,
        metadata: NDArray[np.int32],
        table: NDArray[np.float32],
        adapter_slots: NDArray[np.int32] | None,
        rows: int,
    ) -> NDArray[np.float32]:
        """See Executor."""
        if rows > len(self._logits):
            self._logits = _zeros((rows, self._config.vocab_size), np.float32)
        failed = library().lite_runner_step(
            byref(self._model),
            _pointer(metadata),
            c_int64(len(metadata)),
            c_int64(self._capacity),
            _pointer(table),
            None if adapter_slots is None else _pointer(adapter_slots),
            _pointer(self._x),
            _pointer(self._logits),
        )
        assert not failed, "a packed layer of unknown kind"
        return self._logits[:rows]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Executor."""
        for cache in self._caches:
            slots = cache.reshape(self._slots, -1)
            slots[list(targets)] = slots[list(sources)]

    def close(self) -> None:
        """See Executor."""
        self._blocks, self._caches = [], []


def _zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Aligned; its pages are allocated when they are first written."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return aligned(size)[:size].view(dtype).reshape(shape)


def _pointer(array: NDArray[Any]) -> c_void_p:
    assert array.flags.c_contiguous
    return c_void_p(array.ctypes.data)
