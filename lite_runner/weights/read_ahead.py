"""Prefetching of tensors by threads, ahead of the network that takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights.formats.gguf_blocks import BlockMatrix
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.quantization.quantized import QuantizedTensor
from lite_runner.weights.tensor import LazyIntegers, LazyTensor, widened

THREADS = 2  # two dequantizing threads saturate memory bandwidth
AHEAD_BYTES = 256 << 20  # prefetch limit, so that a large model is not in memory twice

Matrix: TypeAlias = NDArray[Any] | QuantizedTensor | BlockMatrix
T = TypeVar("T")
Advance = Callable[[int], None]


@dataclass(frozen=True)
class _Reading(Generic[T]):
    """How a tensor is read, and the bytes that it then takes."""

    nbytes: int
    read: Callable[[], T]


class _Queue(Generic[T]):
    """What is read ahead, in the mapping's order; each can be taken once."""

    def __init__(self, readings: Mapping[str, _Reading[T]], advance: Advance) -> None:
        self._readings = readings
        self._waiting = dict.fromkeys(readings)
        self._ready: dict[str, Future[T]] = {}
        self._held = 0
        self._advance = advance
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read-weights")
        self._fill()

    def take(self, name: str) -> T:
        if name not in self._ready:
            self._submit(name)
        values = self._ready.pop(name).result()
        self._held -= self._readings[name].nbytes
        self._fill()
        self._advance(1)
        return values

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._ready.clear()

    def _fill(self) -> None:
        while self._waiting and self._held < AHEAD_BYTES:
            self._submit(next(iter(self._waiting)))

    def _submit(self, name: str) -> None:
        del self._waiting[name]
        self._held += self._readings[name].nbytes
        self._ready[name] = self._pool.submit(self._readings[name].read)


class ReadAhead:
    """Call it with a name to take that tensor as float32; each can be taken once.

    Reading starts at once, in the mapping's order, with a bounded prefetch.
    """

    def __init__(
        self, tensors: Mapping[str, LazyTensor], advance: Advance = lambda count: None
    ) -> None:
        readings = {
            name: _Reading(_bytes(one), partial(_widened, one)) for name, one in tensors.items()
        }
        self._queue = _Queue(readings, advance)

    def __call__(self, name: str) -> NDArray[np.float32]:
        """The values, in memory that nobody else writes to."""
        return self._queue.take(name)

    def close(self) -> None:
        """Stop reading; what was not taken is dropped."""
        self._queue.close()


class QuantizedWeights:
    """As ReadAhead, for possibly quantized matrices; every matrix is [out, in]."""

    def __init__(
        self,
        tensors: Mapping[str, LazyTensor],
        config: Decoder,
        advance: Advance = lambda count: None,
    ) -> None:
        transposed = {one.name for one in parameters(config) if one.layout == "in_out"}
        readings = {name: _out_major(one, name in transposed) for name, one in tensors.items()}
        self._queue = _Queue(readings, advance)

    def matrix(self, name: str) -> Matrix:
        """The weight of a linear layer, the embedding or the head [out, in], once.

        Floats are as they are stored: see LazyTensor. Arrays may be read-only views of the
        checkpoint's file.
        """
        return self._queue.take(name)

    def vector(self, name: str) -> NDArray[np.float32]:
        """Any other tensor, once: the gain of a norm, a bias, the table of positions."""
        values = self._queue.take(name)
        return widened(values) if isinstance(values, np.ndarray) else values.float32()

    def close(self) -> None:
        """Stop reading; what was not taken is dropped."""
        self._queue.close()


def _out_major(tensor: LazyTensor, transposed: bool) -> _Reading[Matrix]:
    if tensor.own is not None:
        return _Reading(tensor.own.nbytes, tensor.own.read)
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


def _bytes(tensor: LazyTensor) -> int:
    return 4 * math.prod(tensor.shape)
