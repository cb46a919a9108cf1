"""Operations on float32 arrays, recorded on a tape that computes their gradients backwards.

Rows are the tokens of several texts, one behind the other and without padding. An operation keeps
only what its gradient needs: a closure over a Value would keep its array, too. Temporary arrays are
blocks of rows that stay in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Activation, Norm
from lite_runner.native import library
from lite_runner.native.matrices import matrix
from lite_runner.weights.tensor import narrowed

Array: TypeAlias = NDArray[np.float32]

BLOCK = 64  # rows of an elementwise operation
QUERIES = 64  # of attention: later keys than a block's last query are not computed
KEPT = 512  # tokens of a text up to which attention keeps its probabilities
LOGIT_ROWS = 256  # whose logits are computed at a time
SOFTMAX_ROWS = 4  # of these


class Slot:
    """The gradient of a value, the sum of what is added."""

    def __init__(self) -> None:
        self.grad: Array | None = None
        self._own = False

    def add(self, grad: Array, own: bool = True) -> None:
        """`own`: nobody else uses the array, so that it may be added to."""
        if self.grad is None:
            self.grad, self._own = grad, own
        elif own:
            grad += self.grad
            self.grad, self._own = grad, True
        elif self._own:
            self.grad += grad
        else:
            self.grad, self._own = self.grad + grad, True


class Bfloat16Matrix:
    """A frozen weight [out, in] in bfloat16, packed for the native kernels both ways: what it is
    multiplied with is rounded to bfloat16, and sums are float32."""

    def __init__(self, weight: Array) -> None:
        self._sizes = weight.shape
        bits = narrowed(np.ascontiguousarray(weight), "BF16")
        turned = np.ascontiguousarray(bits.T)
        self._blocks = [matrix(one, rounded_input=True).block() for one in (bits, turned)]

    def times(self, x: Array) -> Array:
        """x [n, in] -> [n, out]"""
        return self._product(0, x)

    def back(self, grad: Array) -> Array:
        """grad [n, out] -> [n, in]"""
        return self._product(1, grad)

    def _product(self, index: int, x: Array) -> Array:
        x = np.ascontiguousarray(x)
        out = np.empty((len(x), self._sizes[index]), np.float32)
        block = self._blocks[index]
        library().lite_runner_linear(block.ctypes.data, x.ctypes.data, len(x), out.ctypes.data)
        return out


class StoredMatrix:
    """A frozen weight [out, in] as its checkpoint has it; each product makes its float32."""

    def __init__(self, read: Callable[[], Array]) -> None:
        self._read = read

    def times(self, x: Array) -> Array:
        """x [n, in] -> [n, out]"""
        return x @ self._read().T

    def back(self, grad: Array) -> Array:
        """grad [n, out] -> [n, in]"""
        return grad @ self._read()


class Value:
    """An array, and its gradient if it has one."""

    def __init__(
        self,
        array: Array,
        slot: Slot | None = None,
        packed: Bfloat16Matrix | StoredMatrix | None = None,
    ) -> None:
        """`packed`: the same weight, to multiply with."""
        self.array, self.slot, self._packed = array, slot, packed

    def times(self, x: Array) -> Array:
        """x [n, in] by this weight [out, in] -> [n, out]"""
        return x @ self.array.T if self._packed is None else self._packed.times(x)

    def back(self, grad: Array) -> Array:
        """grad [n, out] by this weight [out, in] -> [n, in]"""
        return grad @ self.array if self._packed is None else self._packed.back(grad)


class Tape:
    """The operations of a forward pass."""

    def __init__(self) -> None:
        self._steps: list[tuple[Slot, Callable[[Array], None]]] = []

    def record(
        self, array: Array, inputs: Sequence[Value], backward: Callable[[Array], None]
    ) -> Value:
        """The value of an operation; `backward` takes its gradient, which it must not change."""
        if all(one.slot is None for one in inputs):
            return Value(array)
        slot = Slot()
        self._steps.append((slot, backward))
        return Value(array, slot)

    def backward(self) -> None:
        """Compute all gradients, the last operation's first; what it kept is released."""
        while self._steps:
            slot, backward = self._steps.pop()
            if slot.grad is not None:
                backward(slot.grad)
                slot.grad = None


def _blocks(count: int, size: int = BLOCK) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def linear(tape: Tape, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """x [n, in] by a weight [out, in] -> [n, out]"""
    y = weight.times(x.array)
    if bias is not None:
        y += bias.array

    to_x, to_bias = x.slot, None if bias is None else bias.slot
    kept = None if weight.slot is None else x.array

    def backward(grad: Array) -> None:
        if to_x is not None:
            to_x.add(weight.back(grad))
        if weight.slot is not None and kept is not None:
            weight.slot.add(grad.T @ kept)
        if to_bias is not None:
            to_bias.add(grad.sum(0))

    return tape.record(y, [x, weight] if bias is None else [x, weight, bias], backward)


def low_rank(
    tape: Tape, y: Value, x: Value, a: Value, b: Value, scale: float, kept: Array | None
) -> Value:
    """y [n, out] + scale * dropout(x) [n, in] A.T B.T; `kept`: the dropout's factors [n, in].

    y's array is changed: nothing else may use it.
    """
    given = x.array if kept is None else x.array * kept
    narrow = given @ a.array.T
    y.array += narrow @ (b.array.T * np.float32(scale))
    del given

    to_y = y.slot

    def backward(grad: Array) -> None:
        if to_y is not None:
            to_y.add(grad, own=False)
        assert a.slot is not None and b.slot is not None
        b.slot.add(grad.T @ (narrow * np.float32(scale)))
        inner = grad @ (b.array * np.float32(scale))
        a.slot.add(inner.T @ (x.array if kept is None else x.array * kept))
        if x.slot is not None:
            outer = inner @ a.array
            x.slot.add(outer if kept is None else outer * kept)

    return tape.record(y.array, [y, x, a, b], backward)


def add(tape: Tape, x: Value, y: Value, scale: float = 1.0) -> Value:
    """x + scale * y"""
    array = x.array + y.array if scale == 1.0 else x.array + np.float32(scale) * y.array

    to_x, to_y = x.slot, y.slot

    def backward(grad: Array) -> None:
        if to_x is not None:
            to_x.add(grad, own=False)
        if to_y is not None:
            to_y.add(grad, own=False) if scale == 1.0 else to_y.add(grad * np.float32(scale))

    return tape.record(array, [x, y], backward)


def scaled(tape: Tape, x: Value, factor: float) -> Value:
    """x times a number."""
    if factor == 1.0:
        return x

    to_x = x.slot

    def backward(grad: Array) -> None:
        assert to_x is not None
        to_x.add(grad * np.float32(factor))

    return tape.record(x.array * np.float32(factor), [x], backward)


def clipped(tape: Tape, x: Value, low: float | None, high: float, plus: float = 0.0) -> Value:
    """x, from `low` (None: any) to `high`, and a number added."""
    array = np.clip(x.array, low, np.float32(high))

    def backward(grad: Array) -> None:
        assert x.slot is not None
        inside = x.array <= high if low is None else np.abs(x.array - array) == 0
        x.slot.add(grad * inside)

    return tape.record(array + np.float32(plus) if plus else array, [x], backward)


def weighted(tape: Tape, x: Value, gain: Value) -> Value:
    """x [n, width] times a vector of width values, of whatever shape."""

    def backward(grad: Array) -> None:
        if x.slot is not None:
            x.slot.add(grad * gain.array.reshape(-1))
        if gain.slot is not None:
            gain.slot.add(np.einsum("ij,ij->j", grad, x.array).reshape(gain.array.shape))

    return tape.record(x.array * gain.array.reshape(-1), [x, gain], backward)


def rows_of(tape: Tape, table: Value, rows: NDArray[np.int64]) -> Value:
    """[n, width]: rows of a table."""

    def backward(grad: Array) -> None:
        assert table.slot is not None
        total = np.zeros_like(table.array)
        order = np.argsort(rows, kind="stable")
        found, starts = np.unique(rows[order], return_index=True)
        total[found] = np.add.reduceat(grad[order], starts)
        table.slot.add(total)

    return tape.record(table.array[rows], [table], backward)


def picked(tape: Tape, x: Value, rows: NDArray[np.int64]) -> Value:
    """[m, width]: some rows of x, each at most once."""

    to_x, shape = x.slot, x.array.shape

    def backward(grad: Array) -> None:
        assert to_x is not None
        total = np.zeros(shape, np.float32)
        total[rows] = grad
        to_x.add(total)

    return tape.record(x.array[rows], [x], backward)


def norm(
    tape: Tape,
    given: Norm,
    x: Value,
    gain: Value,
    shift: Value | None = None,
    part_width: int | None = None,
) -> Value:
    """Along the last axis, or each `part_width` of it: see spec.Norm."""
    centered = given.kind == "layer"
    flat = x.array.reshape(-1, part_width or x.array.shape[-1])
    width = np.float32(flat.shape[-1])
    out, scales = np.empty_like(flat), np.empty((len(flat), 1), np.float32)
    means = np.zeros((len(flat), 1), np.float32)
    for rows in _blocks(len(flat)):
        part = flat[rows]
        if centered:
            part.mean(-1, keepdims=True, out=means[rows])
            part = part - means[rows]
        squares = np.einsum("ij,ij->i", part, part)[:, None]
        np.divide(1.0, np.sqrt(squares / width + np.float32(given.eps)), out=scales[rows])
        np.multiply(part, scales[rows], out=out[rows])
        out[rows] *= gain.array
        if shift is not None:
            out[rows] += shift.array

    def backward(grad: Array) -> None:
        grad = grad.reshape(flat.shape)
        total = np.empty_like(flat)
        to_gain = np.zeros_like(gain.array)
        for rows in _blocks(len(flat)):
            part = flat[rows] - means[rows] if centered else flat[rows]
            normed = part * scales[rows]
            if gain.slot is not None:
                to_gain += np.einsum("ij,ij->j", grad[rows], normed)
            inner = np.multiply(grad[rows], gain.array, out=total[rows])
            along = np.einsum("ij,ij->i", inner, normed)[:, None] / width
            if centered:
                inner -= inner.mean(-1, keepdims=True)
            normed *= along
            inner -= normed
            inner *= scales[rows]
        if x.slot is not None:
            x.slot.add(total.reshape(x.array.shape))
        if gain.slot is not None:
            gain.slot.add(to_gain)
        if shift is not None and shift.slot is not None:
            shift.slot.add(grad.sum(0))

    inputs = [x, gain] if shift is None else [x, gain, shift]
    return tape.record(out.reshape(x.array.shape), inputs, backward)


def rotated(tape: Tape, x: Value, cos: Array, sin: Array) -> Value:
    """x [n, heads * dims] by cos and sin [n, 1, dims / 2]: the pairs (d, d + dims / 2) of each
    head."""
    half = cos.shape[-1]

    def turned(array: Array, sin: Array) -> Array:
        split = array.reshape(len(cos), -1, 2 * half)
        first, second = split[..., :half], split[..., half:]
        out = np.empty_like(split)
        for rows in _blocks(len(cos)):
            np.multiply(first[rows], cos[rows], out=out[rows, :, :half])
            out[rows, :, :half] -= second[rows] * sin[rows]
            np.multiply(second[rows], cos[rows], out=out[rows, :, half:])
            out[rows, :, half:] += first[rows] * sin[rows]
        return out.reshape(array.shape)

    to_x = x.slot

    def backward(grad: Array) -> None:
        assert to_x is not None
        to_x.add(turned(grad, -sin))

    return tape.record(turned(x.array, sin), [x], backward)


def attention(
    tape: Tape,
    query: Value,
    key: Value,
    value: Value,
    lengths: Sequence[int],
    *,
    head_dim: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    slopes: Array | None = None,
    sinks: Value | None = None,
) -> Value:
    """Causal attention within each text: query [n, heads * head_dim], key and value
    [n, kv_heads * head_dim] -> [n, heads * head_dim]. `slopes` [heads]: ALiBi's; `sinks` [heads]:
    scores of nothing."""
    total = len(query.array)
    kv_heads = key.array.shape[1] // head_dim
    group = query.array.shape[1] // head_dim // kv_heads
    q = query.array.reshape(total, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    k, v = (one.array.reshape(total, kv_heads, 1, head_dim) for one in (key, value))
    k, v = (one.transpose(1, 2, 0, 3) for one in (k, v))
    factor = np.float32(scale)
    sink = None if sinks is None else sinks.array.reshape(kv_heads, group, 1, 1)

    def spans() -> Iterator[tuple[slice, slice]]:
        """Blocks of queries, and the keys that they see."""
        start = 0
        for length in lengths:
            for rows in _blocks(length, QUERIES):
                first = 0 if window is None else max(0, rows.start - window + 1)
                yield (
                    slice(start + rows.start, start + rows.stop),
                    slice(start + first, start + rows.stop),
                )
            start += length

    def probabilities(rows: slice, keys: slice) -> tuple[Array, Array | None]:
        """[kv_heads, group, queries, keys], and of scores with a cap their tanh."""
        scores = q[:, :, rows] @ k[:, :, keys].swapaxes(2, 3)
        scores *= factor
        slope = None
        if softcap is not None:
            scores /= np.float32(softcap)
            slope = np.tanh(scores, out=scores).copy()
            scores *= np.float32(softcap)
        distance = np.arange(rows.start, rows.stop)[:, None] - np.arange(keys.start, keys.stop)
        if slopes is not None:
            scores -= slopes.reshape(kv_heads, group, 1, 1) * distance.astype(np.float32)
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        np.copyto(scores, np.float32(-np.inf), where=hidden)
        most = scores.max(-1, keepdims=True)
        if sink is not None:
            most = np.maximum(most, sink)
        scores -= most
        np.exp(scores, out=scores)
        sums = scores.sum(-1, keepdims=True)
        if sink is not None:
            sums += np.exp(sink - most)
        scores /= sums
        return scores, slope

    out = np.empty((total, kv_heads, group, head_dim), np.float32)
    mixed = out.transpose(1, 2, 0, 3)
    keep = max(lengths) <= KEPT and any(one.slot is not None for one in (query, key, value))
    kept: list[tuple[Array, Array | None]] = []
    for rows, keys in spans():
        found = probabilities(rows, keys)
        mixed[:, :, rows] = found[0] @ v[:, :, keys]
        if keep:
            kept.append(found)

    def backward(grad: Array) -> None:
        to_out = grad.reshape(out.shape).transpose(1, 2, 0, 3)
        to_q = np.empty((total, kv_heads, group, head_dim), np.float32)
        to_k, to_v = (np.zeros((total, kv_heads, head_dim), np.float32) for _ in range(2))
        turned = to_q.transpose(1, 2, 0, 3)
        for index, (rows, keys) in enumerate(spans()):
            found, slope = kept[index] if kept else probabilities(rows, keys)
            width = found.shape[-1]
            given = np.ascontiguousarray(to_out[:, :, rows])
            flat = given.reshape(kv_heads, -1, head_dim)
            by_key = found.reshape(kv_heads, -1, width)
            to_v[keys] += (by_key.swapaxes(1, 2) @ flat).transpose(1, 0, 2)
            inner = given @ v[:, :, keys].swapaxes(2, 3)
            along = np.einsum("kgij,kgij->kgi", inner, found)
            if sinks is not None and sinks.slot is not None:
                share = along * (1 - found.sum(-1))  # the probability of nothing
                sinks.slot.add(-share.sum(-1).reshape(sinks.array.shape))
            inner -= along[..., None]
            inner *= found
            if slope is not None:
                inner *= 1 - slope * slope
            inner *= factor
            turned[:, :, rows] = inner @ k[:, :, keys]
            asked = np.ascontiguousarray(q[:, :, rows]).reshape(kv_heads, -1, head_dim)
            by_key = inner.reshape(kv_heads, -1, width)
            to_k[keys] += (by_key.swapaxes(1, 2) @ asked).transpose(1, 0, 2)
        for one, found_grad in ((query, to_q), (key, to_k), (value, to_v)):
            if one.slot is not None:
                one.slot.add(found_grad.reshape(one.array.shape))

    inputs = [query, key, value] if sinks is None else [query, key, value, sinks]
    return tape.record(out.reshape(query.array.shape), inputs, backward)


def _activated(function: Activation, x: Array) -> tuple[Array, Array]:
    """f(x), and its slope."""
    if function in ("relu", "relu_squared"):
        positive: Array = np.maximum(x, 0)
        if function == "relu":
            return positive, (x > 0).astype(np.float32)
        return positive * positive, positive * np.float32(2)
    if function == "gelu_exact":
        share = 0.5 * (1 + _erf(x / np.float32(math.sqrt(2))))
        bell = np.exp(np.float32(-0.5) * x * x) * np.float32(1 / math.sqrt(2 * math.pi))
        return x * share, share + x * bell
    if function == "gelu":
        root = np.float32(math.sqrt(2 / math.pi))
        curve = np.tanh(root * x * (1 + np.float32(0.044715) * x * x))
        share = 0.5 * (1 + curve)
        steep = root * (1 + np.float32(3 * 0.044715) * x * x)
        return x * share, share + 0.5 * x * (1 - curve * curve) * steep
    rate = np.float32(1.702 if function == "quick_gelu" else 1.0)
    share = x * -rate
    np.exp(share, out=share)
    share += 1
    np.divide(1, share, out=share)
    out = x * share
    slope = out * (1 - share)
    slope *= rate
    slope += share
    return out, slope


def _erf(x: Array) -> Array:
    """The error function, by Abramowitz and Stegun 7.1.26 in float64 (to 1.5e-7)."""
    wide = np.abs(x.astype(np.float64))
    t = 1 / (1 + 0.3275911 * wide)
    terms = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    series = np.zeros_like(t)
    for term in terms[::-1]:
        series = (series + term) * t
    found: Array = (np.sign(x) * (1 - series * np.exp(-wide * wide))).astype(np.float32)
    return found


def activated(tape: Tape, function: Activation, x: Value, times: Value | None = None) -> Value:
    """f(x) * times, elementwise."""
    out = np.empty_like(x.array)
    for rows in _blocks(len(out)):
        found, _ = _activated(function, x.array[rows])
        if times is None:
            out[rows] = found
        else:
            np.multiply(found, times.array[rows], out=out[rows])

    def backward(grad: Array) -> None:
        to_x = np.empty_like(x.array)
        to_times = None if times is None else np.empty_like(x.array)
        for rows in _blocks(len(out)):
            found, slope = _activated(function, x.array[rows])
            np.multiply(slope, grad[rows], out=to_x[rows])
            if times is not None and to_times is not None:
                to_x[rows] *= times.array[rows]
                np.multiply(found, grad[rows], out=to_times[rows])
        if x.slot is not None:
            x.slot.add(to_x)
        if times is not None and times.slot is not None and to_times is not None:
            times.slot.add(to_times)

    return tape.record(out, [x] if times is None else [x, times], backward)


def cross_entropy(
    tape: Tape,
    x: Value,
    head: Value,
    targets: NDArray[np.int64],
    weight: float,
    *,
    bias: Value | None = None,
    scaling: float = 1.0,
    softcap: float | None = None,
) -> float:
    """The sum of the cross entropies of the logits x [n, in] @ head [vocab, in].T with `targets`
    [n]; `bias` [vocab]: of the logits. `weight` times it is what gradients are of, which are
    computed at once: logits are not kept."""
    total = 0.0
    to_bias = None if bias is None or bias.slot is None else np.zeros_like(bias.array)
    learns = x.slot is not None or head.slot is not None or to_bias is not None
    to_x = np.empty_like(x.array if learns else x.array[:0])
    to_head = None if head.slot is None else np.zeros_like(head.array)
    for rows in _blocks(len(x.array), LOGIT_ROWS):
        part, wanted = x.array[rows], targets[rows]
        logits = head.times(part)
        if bias is not None:
            logits += bias.array
        if scaling != 1.0:
            logits /= np.float32(scaling)
        curve = None
        if softcap is not None:
            logits /= np.float32(softcap)
            curve = np.tanh(logits)
            np.multiply(curve, np.float32(softcap), out=logits)
        places = np.arange(len(part)), wanted
        total -= float(logits[places].sum(dtype=np.float64))
        for few in _blocks(len(part), SOFTMAX_ROWS):
            some = logits[few]
            most = some.max(-1, keepdims=True)
            some -= most
            np.exp(some, out=some)
            sums = some.sum(-1, keepdims=True)
            total += float((np.log(sums.astype(np.float64)) + most).sum())
            some *= np.float32(weight) / sums
        if not learns:
            continue
        logits[places] -= np.float32(weight)
        if curve is not None:
            logits *= 1 - curve * curve
        if scaling != 1.0:
            logits /= np.float32(scaling)
        to_x[rows] = head.back(logits)
        if to_head is not None:
            to_head += logits.T @ part
        if to_bias is not None:
            to_bias += logits.sum(0)
    if x.slot is not None:
        x.slot.add(to_x)
    if head.slot is not None and to_head is not None:
        head.slot.add(to_head)
    if bias is not None and bias.slot is not None and to_bias is not None:
        bias.slot.add(to_bias)
    return total
