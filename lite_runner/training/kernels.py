"""The native kernels of training (native/src/training.cc): products of any two matrices, attention
and elementwise operations, with their gradients; and the search for block scales.

They may be called from several threads at once. A call computes in one thread, or in as many as
`use_threads` sets, for a training whose texts are not divided among threads.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.native import library

Array: TypeAlias = NDArray[np.float32]
_Fields: TypeAlias = Sequence[tuple[str, Any]]
_POINTER, _NUMBER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_LINE = 64  # bytes of the cache
_BLOCK = 1 << 26  # bytes
_PANEL = 32  # columns of a product computed together
_threads = 1


def use_threads(count: int) -> None:
    """Set the number of threads of each product and attention."""
    global _threads
    _threads = count


def _fields(kind: Any, names: str) -> Iterator[tuple[str, Any]]:
    return ((name, kind) for name in names.split())


# Of src/training.cc.
class _Product(ctypes.Structure):
    _fields_: ClassVar[_Fields] = (
        ("a", _POINTER),
        *_fields(_NUMBER, "a_row a_column"),
        ("b", _POINTER),
        *_fields(_NUMBER, "b_row b_column bfloat16 panels m n k"),
        ("c", _POINTER),
        *_fields(_NUMBER, "c_row add"),
    )


class _Attention(ctypes.Structure):
    _fields_: ClassVar[_Fields] = (
        *_fields(_POINTER, "q k v out to_out to_q to_k to_v to_sinks lengths"),
        *_fields(_NUMBER, "count heads kv_heads head_dim window"),
        *_fields(_POINTER, "slopes sinks"),
        *_fields(_FLOAT, "scale softcap"),
    )


class _Normed(ctypes.Structure):
    _fields_: ClassVar[_Fields] = (
        *_fields(_POINTER, "x gain shift factors means"),
        ("width", _NUMBER),
        ("eps", _FLOAT),
    )


class _Turned(ctypes.Structure):
    _fields_: ClassVar[_Fields] = (
        *_fields(_POINTER, "x cos sin out"),
        *_fields(_NUMBER, "heads half back"),
    )


def _at(array: NDArray[Any] | None) -> int | None:
    # Not .ctypes.data, which takes twice as long; a step calls this 16,000 times.
    return None if array is None else array.__array_interface__["data"][0]


def empty(rows: int, columns: int, dtype: Any = np.float32) -> NDArray[Any]:
    """An array at a line of the cache, which vectors of the kernels are as long as: malloc gives
    16 bytes behind one, where each vector would be read from two."""
    size = rows * columns
    room = np.empty(size + _LINE, dtype)
    start = -room.__array_interface__["data"][0] % _LINE // room.itemsize
    return room[start : start + size].reshape(rows, columns)


class Room:
    """Copies of frozen matrices, at lines of the cache and in blocks that are large enough for
    NumPy to ask for huge pages: products read ahead of what they compute, and pages are what they
    wait for."""

    def __init__(self) -> None:
        self._block, self._used = np.empty((1, 0), np.uint8), 0

    def taken(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array in this memory."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self._used + size > self._block.size:
            self._block, self._used = empty(1, max(_BLOCK, size), np.uint8), 0
        taken: NDArray[Any] = self._block[0, self._used : self._used + size].view(dtype)
        self._used += (size + _LINE - 1) // _LINE * _LINE
        return taken.reshape(shape)

    def copied(self, matrix: NDArray[Any]) -> NDArray[Any]:
        """A copy of the array in this memory."""
        copy = self.taken(matrix.shape, matrix.dtype)
        copy[...] = matrix
        return copy


class Panels:
    """A matrix [k, n] as its product reads it, so that none packs it again: panels [n / 32][k][32],
    with zeros behind the last columns."""

    def __init__(self, matrix: NDArray[Any], room: Room) -> None:
        self.shape = matrix.shape
        self.array = room.taken((-(-matrix.shape[1] // _PANEL), len(matrix), _PANEL), matrix.dtype)
        for place, panel in enumerate(self.array):
            part = matrix[:, place * _PANEL : (place + 1) * _PANEL]
            panel[:, : part.shape[1]] = part
            panel[:, part.shape[1] :] = 0

    def rows(self, which: NDArray[np.int64]) -> NDArray[Any]:
        """[m, n]: some rows of the matrix."""
        found = self.array[:, which].transpose(1, 0, 2)
        return found.reshape(len(which), -1)[:, : self.shape[1]]


def product(
    a: Array, b: NDArray[Any] | Panels, into: Array | None = None, *, spare: int = 0
) -> Array:
    """a [m, k] @ b [k, n], or `into` [m, n], to which it is added; each may be a transposed or
    sliced array. With b in bfloat16 (uint16) a is rounded to it, too; sums are float32, in the
    order of k. `spare`: numbers behind each row, so that long rows do not share the places of
    caches."""
    (m, k), (depth, n) = a.shape, b.shape
    held = b.array[0] if isinstance(b, Panels) else b
    assert depth == k and a.dtype == np.float32 and held.dtype in (np.float32, np.uint16)
    if not isinstance(b, Panels) and n < min(m, _PANEL) and into is None and b.dtype == np.float32:
        return np.ascontiguousarray(product(b.T, a.T).T)
    out = empty(m, n + spare)[:, :n] if into is None else into
    assert out.strides[1] == 4 and out.shape == (m, n)
    asked = _Product(
        _at(a),
        *(stride // 4 for stride in a.strides),
        _at(held),
        *(stride // held.itemsize for stride in held.strides),
        held.dtype == np.uint16,
        isinstance(b, Panels),
        m,
        n,
        k,
        _at(out),
        out.strides[0] // 4,
        into is not None,
    )
    library().lite_runner_product(ctypes.byref(asked), _threads)
    return out


class Attention:
    """Causal attention within each text: queries [n, heads * head_dim], keys and values
    [n, kv_heads * head_dim] -> [n, heads * head_dim]."""

    def __init__(
        self,
        query: Array,
        key: Array,
        value: Array,
        lengths: Sequence[int],
        *,
        head_dim: int,
        scale: float,
        softcap: float | None,
        window: int | None,
        slopes: Array | None,
        sinks: Array | None,
    ) -> None:
        self._kept = [np.ascontiguousarray(one) for one in (query, key, value)]
        self._lengths = np.array(lengths, np.int64)
        self._biases = [
            None if one is None else np.ascontiguousarray(one, np.float32)
            for one in (slopes, sinks)
        ]
        heads, kv_heads = query.shape[1] // head_dim, key.shape[1] // head_dim
        self._sizes = len(lengths), heads, kv_heads, head_dim, window or 0
        self._factors = scale, softcap or 0.0

    def forward(self) -> Array:
        """The attention output."""
        out = np.empty_like(self._kept[0])
        self._run(out, None, None, None, None, None)
        return out

    def gradients(self, grad: Array) -> tuple[Array, Array, Array, Array]:
        """Gradients of queries, keys, values, and sinks [heads]."""
        query, key, value = self._kept
        found = np.empty_like(query), np.zeros_like(key), np.zeros_like(value)
        to_sinks = np.zeros(self._sizes[1], np.float32)
        asked = None if self._biases[1] is None else to_sinks
        self._run(None, np.ascontiguousarray(grad), *found, asked)
        return *found, to_sinks

    def _run(self, *arrays: Array | None) -> None:
        asked = _Attention(
            *(_at(one) for one in (*self._kept, *arrays, self._lengths)),
            *self._sizes,
            *(_at(one) for one in self._biases),
            *self._factors,
        )
        library().lite_runner_trained_attention(ctypes.byref(asked), _threads)


def softmax(rows: Array, weight: float) -> float:
    """`rows` [n, width] become `weight` times their softmax; the sum of their log-sum-exps."""
    apart, size = rows.strides
    assert size == 4
    found: float = library().lite_runner_softmax(_at(rows), *rows.shape, apart // 4, weight)
    return found


def gated(x: Array, times: Array | None, rate: float) -> Array:
    """x * sigmoid(rate * x), times an array if given; all contiguous in memory."""
    assert x.flags.c_contiguous and (times is None or times.flags.c_contiguous)
    out = np.empty_like(x)
    library().lite_runner_gated(_at(x), _at(times), x.size, rate, _at(out))
    return out


def gated_gradients(
    x: Array, times: Array | None, grad: Array, rate: float
) -> tuple[Array, Array | None]:
    """Gradients of x and of `times`."""
    grad = np.ascontiguousarray(grad)
    to_x, to_times = np.empty_like(x), None if times is None else np.empty_like(x)
    library().lite_runner_gated_gradients(
        *map(_at, (x, times, grad)), x.size, rate, _at(to_x), _at(to_times)
    )
    return to_x, to_times


class Normed:
    """x [n, width] divided by its root mean square, or (`centered`) minus its mean, divided by its
    standard deviation; times a gain [width], plus a shift [width] if there is one."""

    def __init__(
        self, x: Array, gain: Array, shift: Array | None, *, centered: bool, eps: float
    ) -> None:
        self._x, self._gain = np.ascontiguousarray(x), np.ascontiguousarray(gain)
        self._shift, self._eps = None if shift is None else np.ascontiguousarray(shift), eps
        self._factors = np.empty((len(x), 1), np.float32)
        self._means = np.empty((len(x), 1), np.float32) if centered else None

    def forward(self) -> Array:
        """[n, width]"""
        return self._run(None)

    def gradient(self, grad: Array) -> Array:
        """The gradient of x."""
        return self._run(np.ascontiguousarray(grad))

    def plain(self) -> Array:
        """Without gain and shift."""
        x = self._x if self._means is None else self._x - self._means
        found: Array = x * self._factors
        return found

    def _run(self, grad: Array | None) -> Array:
        out = np.empty_like(self._x)
        arrays = self._x, self._gain, self._shift, self._factors, self._means
        asked = _Normed(*(_at(one) for one in arrays), self._x.shape[1], self._eps)
        library().lite_runner_normed(ctypes.byref(asked), len(out), _at(grad), _at(out))
        return out


def turned(x: Array, cos: Array, sin: Array, *, back: bool) -> Array:
    """x [n, heads * dims] by cos and sin [n, 1, dims / 2]: the pairs (d, d + dims / 2) of each
    head, the other way if `back`."""
    x = np.ascontiguousarray(x)
    out, half = np.empty_like(x), cos.shape[-1]
    heads = x.shape[1] // (2 * half)
    asked = _Turned(*(_at(one) for one in (x, cos, sin, out)), heads, half, back)
    library().lite_runner_turned(ctypes.byref(asked), len(x))
    return out


def searched(x: Array, weights: Array, firsts: Array, levels: int) -> tuple[Array, Array]:
    """See `k_quants.Search`; groups are of 32 values, or with levels of 16."""
    groups, size = x.shape
    assert size == 32 or (size == 16 and levels)
    x, weights, firsts = (np.ascontiguousarray(one, np.float32) for one in (x, weights, firsts))
    scales, minimums = np.zeros((2, groups), np.float32)
    sizes, out = (groups, size, levels), (_at(scales), _at(minimums))
    library().lite_runner_search(_at(x), _at(weights), *sizes, _at(firsts), len(firsts), *out)
    return scales, minimums
