"""Tensors read and widened by threads, ahead of the network that takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from lite_runner.weights.tensor import LazyTensor

THREADS = 2  # of dequantizing two saturate the memory
AHEAD_BYTES = 1 << 30  # held ready at most, so that a large model is not in memory twice


class ReadAhead:
    """Call it with a name to take that tensor as float32; a tensor can be taken once.

    Reading starts at once, in the mapping's order, and never runs far ahead of the taking.
    """

    def __init__(
        self,
        tensors: Mapping[str, LazyTensor],
        advance: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._waiting = dict(tensors)
        self._ready: dict[str, Future[NDArray[np.float32]]] = {}
        self._sizes = {name: 4 * math.prod(tensor.shape) for name, tensor in tensors.items()}
        self._held = 0
        self._advance = advance
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read-weights")
        self._fill()

    def __call__(self, name: str) -> NDArray[np.float32]:
        """The values, in memory that nobody else writes to."""
        if name not in self._ready:
            self._submit(name)
        values = self._ready.pop(name).result()
        self._held -= self._sizes[name]
        self._fill()
        self._advance(1)
        return values

    def close(self) -> None:
        """Stop reading; what was not taken is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._ready.clear()

    def _fill(self) -> None:
        while self._waiting and self._held < AHEAD_BYTES:
            self._submit(next(iter(self._waiting)))

    def _submit(self, name: str) -> None:
        tensor = self._waiting.pop(name)
        self._held += self._sizes[name]
        self._ready[name] = self._pool.submit(tensor.float32)
