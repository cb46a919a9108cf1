"""Prefetching of tensors by threads, and the memory that loading takes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights import LazyIntegers, LazyTensor, drop_pages, widened
from lite_runner.weights.formats.gguf_blocks import BlockMatrix
from lite_runner.weights.quantization.quantized import QuantizedTensor

Matrix: TypeAlias = NDArray[Any] | QuantizedTensor | BlockMatrix
T = TypeVar("T")
Advance = Callable[[int], None]
THREADS = 2  # two dequantizing threads saturate memory bandwidth
AHEAD_BYTES = 256 << 20  # prefetch limit, so that a large model is not in memory twice
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class _Reading(Generic[T]):
    """The function that reads a tensor, and the bytes of its result."""

    nbytes: int
    read: Callable[[], T]


class _Queue(Generic[T]):
    """Tensors read ahead in the mapping's order; each can be taken once."""

    def __init__(self, readings: Mapping[str, _Reading[T]], advance: Advance) -> None:
        self._readings = readings
        self._waiting = dict.fromkeys(readings)
        self._ready: dict[str, Future[T]] = {}
        self._held = 0
        self._advance = advance
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read-weights")
        self._fill()

    def _take(self, name: str) -> T:
        if name not in self._ready:
            self._submit(name)
        values = self._ready.pop(name).result()
        self._held -= self._readings[name].nbytes
        self._fill()
        self._advance(1)
        return values

    def close(self) -> None:
        """Stop reading; tensors that were not taken are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._ready.clear()

    def _fill(self) -> None:
        while self._waiting and self._held < AHEAD_BYTES:
            self._submit(next(iter(self._waiting)))

    def _submit(self, name: str) -> None:
        del self._waiting[name]
        self._held += self._readings[name].nbytes
        self._ready[name] = self._pool.submit(self._readings[name].read)


class ReadAhead(_Queue[NDArray[np.float32]]):
    """Call it with a name to take that tensor as float32; each can be taken once.

    Reading starts at once, in the mapping's order, with a bounded prefetch.
    """

    def __init__(
        self, tensors: Mapping[str, LazyTensor], advance: Advance = lambda count: None
    ) -> None:
        super().__init__(
            {
                name: _Reading(4 * math.prod(one.shape), partial(_widened, one))
                for name, one in tensors.items()
            },
            advance,
        )

    def __call__(self, name: str) -> NDArray[np.float32]:
        """The values, in memory that is not shared."""
        return self._take(name)


class QuantizedWeights(_Queue[Matrix]):
    """As ReadAhead, for possibly quantized matrices; every matrix is [out, in]."""

    def __init__(
        self,
        tensors: Mapping[str, LazyTensor],
        config: Decoder,
        advance: Advance = lambda count: None,
    ) -> None:
        transposed = {one.name for one in parameters(config) if one.transposed}
        readings = {name: _out_major(one, name in transposed) for name, one in tensors.items()}
        super().__init__(readings, advance)

    def matrix(self, name: str) -> Matrix:
        """The weight of a linear layer, the embedding or the head [out, in], once.

        Floats are as they are stored: see LazyTensor. Arrays may be read-only views of the
        checkpoint's file.
        """
        return self._take(name)

    def vector(self, name: str) -> NDArray[np.float32]:
        """Any other tensor, once: the gain of a norm, a bias, the table of positions."""
        values = self._take(name)
        return widened(values) if isinstance(values, np.ndarray) else values.float32()


def _out_major(tensor: LazyTensor, transposed: bool) -> _Reading[Matrix]:
    if tensor.blocks is not None:
        return _Reading(tensor.blocks.nbytes, tensor.blocks.read)
    if tensor.integers is not None:
        shape = tensor.shape[::-1] if transposed else tensor.shape
        nbytes = tensor.integers.scheme.nbytes(*shape)
        return _Reading(nbytes, partial(_integers, tensor, tensor.integers, transposed))
    return _Reading(tensor.nbytes, partial(_floats, tensor, transposed))


def _integers(
    tensor: LazyTensor, integers: LazyIntegers, transposed: bool
) -> NDArray[Any] | QuantizedTensor:
    try:
        return integers.read()
    except ArtifactError:
        if not integers.optional:
            raise
    return _floats(tensor, transposed)


def _floats(tensor: LazyTensor, transposed: bool) -> NDArray[Any]:
    values = tensor.read()
    if not transposed:
        return values
    columns = np.ascontiguousarray(values.T)
    drop_pages(values)
    return columns


def _widened(tensor: LazyTensor) -> NDArray[np.float32]:
    stored = tensor.read()
    values = widened(stored)
    if values is not stored:
        drop_pages(stored)
    return values


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of one tensor while it is loaded."""

    temporary: int  # buffers while it is read
    loaded: int  # read, waiting to be packed
    resident: int  # in the network
    copied: bool  # packing copies it; else the network uses the loaded array


def native_bytes(tensor: LazyTensor, *, dequantize: bool) -> TensorBytes:
    """Packed for the native operators: quantized, 16 bits or float32."""
    count = math.prod(tensor.shape)
    if tensor.blocks is not None:  # 6-bit scales take 8
        size = 4 * count if dequantize else tensor.blocks.nbytes * 33 // 32
        return TensorBytes(0, tensor.blocks.nbytes, size, True)
    if tensor.integers is not None:
        loaded = tensor.integers.scheme.nbytes(*tensor.shape[-2:])
        temporary = 0 if tensor.integers.stored or tensor.part is not None else 4 * count
        return TensorBytes(temporary, loaded, 4 * count if dequantize else loaded, True)
    if len(tensor.shape) == 1:
        return TensorBytes(0, 4 * count, 4 * count, True)
    return TensorBytes(_rounding_bytes(tensor), tensor.nbytes, tensor.nbytes, True)


def mindspore_bytes(tensor: LazyTensor, *, copied: bool) -> TensorBytes:
    """For MindSpore's operators on a CPU: float32; `copied`: matrices are transposed."""
    size = 4 * math.prod(tensor.shape)
    integers, temporary = tensor.integers, _rounding_bytes(tensor)
    if integers is not None:
        temporary = integers.scheme.nbytes(*tensor.shape[-2:])
    if tensor.dtype != "F32":
        temporary += tensor.nbytes
    return TensorBytes(temporary, size, size, copied and len(tensor.shape) > 1)


def _rounding_bytes(tensor: LazyTensor) -> int:
    """A float32 copy, of tensors that are rounded as a whole."""
    rounded = tensor.part is None and tensor.dtype != "F32"
    return 4 * math.prod(tensor.shape) if rounded else 0


def loading_peak(tensor_bytes: Mapping[str, TensorBytes]) -> int:
    """Peak bytes while tensors are read in order and packed by layer: the loaded tensors of a layer
    are freed once it is packed, and the next ones are read ahead."""
    layers = [
        list(some) for _, some in groupby(tensor_bytes.items(), lambda item: _layer_of(item[0]))
    ]
    most = packed = 0
    waiting = [one for layer in layers for _, one in layer]
    for layer in layers:
        mine = [one for _, one in layer]
        del waiting[: len(mine)]
        sources = sum(one.loaded for one in mine if one.copied)
        temporary = max((one.temporary for one in waiting[:2]), default=0)  # two threads read
        most = max(most, packed + max(one.temporary + one.loaded for one in mine))
        packed += sum(one.resident for one in mine)
        largest = max(one.loaded for one in mine)
        ahead = min(sum(one.loaded for one in waiting), max(0, AHEAD_BYTES - largest))
        most = max(most, packed + sources + ahead + temporary)
    return most


def _layer_of(name: str) -> str:
    found = _LAYER.search(name)
    return found[1] if found else name
