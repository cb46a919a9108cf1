"""Operations on float32 arrays, recorded on a tape that computes their gradients backwards.

Rows are the tokens of several texts, one behind the other and without padding. An operation keeps
only what its gradient needs: a closure over a Value would keep its array, too. Temporary arrays are
blocks of rows that stay in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Activation, Norm
from lite_runner.training.kernels import (
    Array,
    Attention,
    Normed,
    Panels,
    Room,
    gated,
    gated_gradients,
    product,
    softmax,
    turned,
)
from lite_runner.weights import narrowed

BLOCK = 64  # rows of an elementwise operation
LOGIT_ROWS = 256  # rows whose logits are computed at a time
_RATES: dict[str, float] = {"silu": 1.0, "quick_gelu": 1.702}  # of x * sigmoid(rate * x)


class Slot:
    """The gradient slot of a value: a sum."""

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

    def add_product(self, compute: Callable[[Array | None], Array]) -> None:
        """Add a product, which `compute` returns, or adds to the gradient so far in place."""
        total = self.grad if self._own else None
        found = compute(total)
        if total is None:
            self.add(found)


class PanelMatrix:
    """A frozen weight [out, in] as products read it, forwards and backwards: two copies, which no
    product packs; a tenth faster."""

    def __init__(self, weight: Array, room: Room) -> None:
        self.forward, self.back = Panels(weight.T, room), Panels(weight, room)


class Bfloat16Matrix:
    """A frozen weight [out, in] in bfloat16: what it is multiplied with is rounded to bfloat16, and
    sums are float32."""

    def __init__(self, weight: Array, room: Room) -> None:
        self.back = room.copied(narrowed(np.ascontiguousarray(weight), "BF16"))
        self.forward = self.back.T


class StoredMatrix:
    """A frozen weight [out, in] as its checkpoint has it; each product makes its float32."""

    def __init__(self, read: Callable[[], Array]) -> None:
        self._read = read

    @property
    def forward(self) -> Array:
        """[in, out]"""
        return self._read().T

    @property
    def back(self) -> Array:
        """[out, in]"""
        return self._read()


FrozenMatrix: TypeAlias = PanelMatrix | Bfloat16Matrix | StoredMatrix


class Value:
    """An array, with a gradient slot if it needs one."""

    def __init__(
        self, array: Array, slot: Slot | None = None, packed: FrozenMatrix | None = None
    ) -> None:
        """`packed`: the same weight, to multiply with."""
        self.array, self.slot, self._packed = array, slot, packed

    def rows(self, which: NDArray[np.int64]) -> Array:
        """[m, in]: some rows of this table."""
        packed = self._packed
        return packed.back.rows(which) if isinstance(packed, PanelMatrix) else self.array[which]

    def times(self, x: Array, spare: int = 0) -> Array:
        """x [n, in] by this weight [out, in] -> [n, out]; `spare`: see product."""
        weight = self.array.T if self._packed is None else self._packed.forward
        return product(x, weight, spare=spare)

    def back(self, grad: Array, into: Array | None = None) -> Array:
        """grad [n, out] by this weight [out, in] -> [n, in], or added to `into`."""
        return product(grad, self.array if self._packed is None else self._packed.back, into)


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
        """Compute all gradients, the last operation first, releasing what each kept."""
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
            to_x.add_product(partial(weight.back, grad))
        if weight.slot is not None and kept is not None:
            weight.slot.add(product(grad.T, kept))
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
    narrow = product(given, a.array.T)
    product(narrow, b.array.T * np.float32(scale), into=y.array)
    del given

    to_y = y.slot

    def backward(grad: Array) -> None:
        if to_y is not None:
            to_y.add(grad, own=False)
        assert a.slot is not None and b.slot is not None
        b.slot.add(product(grad.T, narrow * np.float32(scale)))
        inner = product(grad, b.array * np.float32(scale))
        a.slot.add(product(inner.T, x.array if kept is None else x.array * kept))
        if x.slot is not None:
            if kept is None:
                x.slot.add_product(partial(product, inner, a.array))
            else:
                x.slot.add(product(inner, a.array) * kept)

    return tape.record(y.array, [y, x, a, b], backward)


def add(tape: Tape, x: Value, y: Value, scale: float = 1.0) -> Value:
    array = x.array + y.array if scale == 1.0 else x.array + np.float32(scale) * y.array

    to_x, to_y = x.slot, y.slot

    def backward(grad: Array) -> None:
        if to_x is not None:
            to_x.add(grad, own=False)
        if to_y is not None:
            to_y.add(grad, own=False) if scale == 1.0 else to_y.add(grad * np.float32(scale))

    return tape.record(array, [x, y], backward)


def shifted(tape: Tape, x: Value, bias: Value) -> Value:
    """x [n, width] + bias [width]"""
    to_x, to_bias = x.slot, bias.slot

    def backward(grad: Array) -> None:
        if to_x is not None:
            to_x.add(grad, own=False)
        if to_bias is not None:
            to_bias.add(grad.sum(0))

    return tape.record(x.array + bias.array, [x, bias], backward)


def scaled(tape: Tape, x: Value, factor: float) -> Value:
    """x times a scalar."""
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
    """x [n, width] times a vector of `width` values in any shape."""

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

    return tape.record(table.rows(rows), [table], backward)


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
    flat = x.array.reshape(-1, part_width or x.array.shape[-1])
    normed = Normed(
        flat,
        gain.array,
        None if shift is None else shift.array,
        centered=given.kind == "layer",
        eps=given.eps,
    )

    def backward(grad: Array) -> None:
        grad = grad.reshape(flat.shape)
        if x.slot is not None:
            x.slot.add(normed.gradient(grad).reshape(x.array.shape))
        if gain.slot is not None:
            gain.slot.add(np.einsum("ij,ij->j", grad, normed.plain()))
        if shift is not None and shift.slot is not None:
            shift.slot.add(grad.sum(0))

    inputs = [x, gain] if shift is None else [x, gain, shift]
    return tape.record(normed.forward().reshape(x.array.shape), inputs, backward)


def rotated(tape: Tape, x: Value, cos: Array, sin: Array) -> Value:
    """x [n, heads * dims] by cos and sin [n, 1, dims / 2]: the pairs (d, d + dims / 2) of each
    head."""
    to_x = x.slot

    def backward(grad: Array) -> None:
        assert to_x is not None
        to_x.add(turned(grad, cos, sin, back=True))

    return tape.record(turned(x.array, cos, sin, back=False), [x], backward)


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
    computed = Attention(
        query.array,
        key.array,
        value.array,
        lengths,
        head_dim=head_dim,
        scale=scale,
        softcap=softcap,
        window=window,
        slopes=slopes,
        sinks=None if sinks is None else sinks.array,
    )

    inputs = [query, key, value] if sinks is None else [query, key, value, sinks]

    def backward(grad: Array) -> None:
        for one, found in zip(inputs, computed.gradients(grad), strict=False):
            if one.slot is not None:
                one.slot.add(found.reshape(one.array.shape))

    return tape.record(computed.forward(), inputs, backward)


def _activated(function: Activation, x: Array) -> tuple[Array, Array]:
    """f(x), and its derivative."""
    if function in ("relu", "relu_squared"):
        positive: Array = np.maximum(x, 0)
        if function == "relu":
            return positive, (x > 0).astype(np.float32)
        return positive * positive, positive * np.float32(2)
    if function == "gelu_exact":
        share = 0.5 * (1 + _erf(x / np.float32(math.sqrt(2))))
        bell = np.exp(np.float32(-0.5) * x * x) * np.float32(1 / math.sqrt(2 * math.pi))
        return x * share, share + x * bell
    root = np.float32(math.sqrt(2 / math.pi))
    curve = np.tanh(root * x * (1 + np.float32(0.044715) * x * x))
    share = 0.5 * (1 + curve)
    steep = root * (1 + np.float32(3 * 0.044715) * x * x)
    return x * share, share + 0.5 * x * (1 - curve * curve) * steep


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


def _gated(tape: Tape, rate: float, x: Value, times: Value | None) -> Value:
    by = None if times is None else times.array

    def backward(grad: Array) -> None:
        to_x, to_times = gated_gradients(x.array, by, grad, rate)
        if x.slot is not None:
            x.slot.add(to_x)
        if times is not None and times.slot is not None and to_times is not None:
            times.slot.add(to_times)

    inputs = [x] if times is None else [x, times]
    return tape.record(gated(x.array, by, rate), inputs, backward)


def activated(tape: Tape, function: Activation, x: Value, times: Value | None = None) -> Value:
    """f(x) * times, elementwise."""
    if function in _RATES:
        return _gated(tape, _RATES[function], x, times)
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
        logits = head.times(part, spare=16)
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
        total += softmax(logits, weight)
        if not learns:
            continue
        logits[places] -= np.float32(weight)
        if curve is not None:
            logits *= 1 - curve * curve
        if scaling != 1.0:
            logits /= np.float32(scaling)
        to_x[rows] = head.back(logits)
        if to_head is not None:
            product(logits.T, part, into=to_head)
        if to_bias is not None:
            to_bias += logits.sum(0)
    if x.slot is not None:
        x.slot.add(to_x)
    if head.slot is not None and to_head is not None:
        head.slot.add(to_head)
    if bias is not None and bias.slot is not None and to_bias is not None:
        bias.slot.add(to_bias)
    return total
