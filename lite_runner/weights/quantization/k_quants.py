"""Floats in blocks of GGUF: Q4_K, Q5_0 and Q6_K by llama.cpp's search, others by the gguf library,
and integers of ours that are such blocks already.

With the importance of each input (the mean of its squares, of an importance matrix) the search
weighs errors as llama.cpp does, of Q4_0 and Q4_1 too.

A block of Q4_K is eight groups of 32 values, of Q6_K sixteen of 16. Each group has a scale (Q4_K
also a minimum), itself an integer times a float16 of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.system.environment import cores
from lite_runner.weights.quantization.quantized import VALUES_AT_ONCE, QuantizedTensor, unpacked

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
# Of groups [n, values], weights of their errors, first scales and levels: the scales and negated
# minimums whose integers are nearest. Of the first scales each is fitted by least squares. Integers
# are -levels to levels - 1, without minimums, or with levels 0 from 0 to 15.
Search: TypeAlias = Callable[[Floats, Floats, Floats, int], tuple[Floats, Floats]]
_TINY = np.float32(1e-30)
# First scales divide the largest value by levels + each of _STEPS, or a group's span by _LEVELS.
_STEPS = np.arange(-0.9, 0.95, 0.1, dtype=np.float32)
_LEVELS = np.array([15, *np.arange(14, 16.05, 0.1, dtype=np.float32)], np.float32)
_UNSEEN = 1e-15  # so that products of two such weights exceed _TINY


def blocks_of(
    values: Floats, type_name: str, search: Search, importance: Floats | None = None
) -> Bytes:
    """A matrix [rows, columns] in blocks [rows, bytes of a row]; whole blocks make a row.
    `importance`: of each column."""
    own = {"Q4_K": _q4_k, "Q5_0": _q5_0, "Q6_K": _q6_k}
    if importance is not None:
        own |= {"Q4_0": _q4_0, "Q4_1": _q4_1}
    convert = own.get(type_name) or _by_library(type_name)
    step = max(1, VALUES_AT_ONCE // values.shape[1])
    parts = [values[start : start + step] for start in range(0, len(values), step)]
    with ThreadPoolExecutor(cores()) as pool:
        pieces = list(pool.map(lambda part: convert(part, search, importance), parts))
    return np.concatenate(pieces).reshape(len(values), -1)


def _grouped(values: Floats, importance: Floats | None, block: int) -> tuple[Floats, Floats]:
    """Values [n, 32] of a matrix, and the weights of their errors; of an importance they grow
    with a value against those of its `block`, as llama.cpp has them."""
    x = values.reshape(-1, 32)
    plain = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    if importance is None:
        return x, plain
    blocks = values.reshape(-1, block)
    factor = 2 if block == 256 else 1
    mean = factor * (blocks * blocks).mean(-1).repeat(block // 32)[:, None]
    return x, _seen(_each(importance, values, 32) * np.sqrt(mean + x * x), plain)


def _each(importance: Floats, values: Floats, group: int) -> Floats:
    """The importance of the column of each value [n, group]."""
    return np.broadcast_to(importance.astype(np.float32), values.shape).reshape(-1, group)


def _seen(weights: Floats, plain: Floats) -> Floats:
    """Weights of errors in groups [n, k]; the `plain` ones of groups whose inputs a text never
    has, which say nothing."""
    return np.where(weights.max(-1, keepdims=True) > _UNSEEN, weights, plain)


def _by_library(type_name: str) -> Callable[[Floats, Search, Floats | None], Bytes]:
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[type_name]
    return lambda values, *_: quants.quantize(np.ascontiguousarray(values), kind)


def blocks_of_integers(matrix: QuantizedTensor) -> tuple[str, Bytes]:
    """Integers in groups of 32 as blocks: 4 bits as Q4_1, 8 as Q8_0."""
    rows = len(matrix.values)
    scales = matrix.scales.astype("<f2").reshape(-1, 1).view(np.uint8)
    if matrix.minimums is None:
        values = matrix.values.view(np.uint8).reshape(-1, 32)
        return "Q8_0", np.concatenate([scales, values], 1).reshape(rows, -1)
    minimums = matrix.minimums.astype("<f2").reshape(-1, 1).view(np.uint8)
    pairs = _halves(unpacked(matrix.values.view(np.uint8)).reshape(-1, 32))
    return "Q4_1", np.concatenate([scales, minimums, pairs], 1).reshape(rows, -1)


def _q4_0(values: Floats, search: Search, importance: Floats | None) -> Bytes:
    x, weights = _grouped(values, importance, values.shape[1])
    d = search(x, weights, 8 + _STEPS, 8)[0].astype(np.float16)
    q = np.clip(np.rint(x * _inverse(d.astype(np.float32)[:, None])), -8, 7) + 8
    return np.concatenate([d.astype("<f2").reshape(-1, 1).view(np.uint8), _halves(q)], 1)


def _q4_1(values: Floats, search: Search, importance: Floats | None) -> Bytes:
    x, weights = _grouped(values, importance, values.shape[1])
    d, low = (one.astype(np.float16) for one in search(x, weights, _LEVELS, 0))
    wide = x + low.astype(np.float32)[:, None]
    q = np.clip(np.rint(wide * _inverse(d.astype(np.float32)[:, None])), 0, 15)
    heads = [one.astype("<f2").reshape(-1, 1).view(np.uint8) for one in (d, -low)]
    return np.concatenate([*heads, _halves(q)], 1)


def _halves(q: NDArray[Any]) -> Bytes:
    """Codes [n, 32], 0 to 15, two per byte, the first half in the lower bits."""
    codes = q.astype(np.uint8)
    pairs: Bytes = codes[:, :16] | codes[:, 16:] << np.uint8(4)
    return pairs


def _q4_k(values: Floats, search: Search, importance: Floats | None) -> Bytes:
    x, weights = _grouped(values, importance, 256)
    x, scales, minimums = (
        one.reshape(-1, 8, *one.shape[1:]) for one in (x, *search(x, weights, _LEVELS, 0))
    )
    d, steps = _steps(scales)
    d_minimum, minimum_steps = _steps(minimums)
    scale = (d[:, None] * steps)[..., None]
    q = (x + (d_minimum[:, None] * minimum_steps)[..., None]) * _inverse(scale)
    q = np.clip(np.rint(q), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    # The upper two bits of the last four steps lie in those of the first four bytes.
    first, last = (np.concatenate([one[:, part] for one in (steps, minimum_steps)], 1)
                   for part in (slice(4), slice(4, 8)))  # fmt: skip
    first, last = first.astype(np.uint8), last.astype(np.uint8)
    upper = first | (last >> 4) << 6
    lower = (last[:, :4] & 15) | (last[:, 4:] & 15) << 4
    heads = [one.astype("<f2").reshape(-1, 1).view(np.uint8) for one in (d, d_minimum)]
    codes = (q[:, :, 0] | q[:, :, 1] << 4).reshape(len(x), -1)
    return np.concatenate([*heads, upper, lower, codes], 1)


def _steps(values: Floats) -> tuple[Floats, Floats]:
    """Non-negative numbers [n, 8] as integers up to 63 times a float16 [n]."""
    largest = values.max(-1)
    d = (largest / 63).astype(np.float16).astype(np.float32)
    steps = np.minimum(np.rint(63 / np.maximum(largest, _TINY)[:, None] * values), 63)
    return d, steps


def _q6_k(values: Floats, search: Search, importance: Floats | None) -> Bytes:
    x = values.reshape(-1, 16)
    weights = x * x
    if importance is not None:
        weights = _seen(_each(importance, values, 16), weights)
    scales = search(x, weights, 32 + _STEPS, 32)[0].reshape(-1, 16)
    x = x.reshape(-1, 16, 16)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(-1)[:, None], 1)
    inverse = np.divide(-128, largest, out=np.zeros_like(largest), where=np.abs(largest) > _TINY)
    d = np.divide(1, inverse, out=np.zeros_like(inverse), where=inverse != 0)
    d = d.astype(np.float16).astype(np.float32)
    steps = np.clip(np.rint(inverse * scales), -128, 127)
    q = np.rint(x * _inverse((d * steps)[..., None]))
    q = (np.clip(q, -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    lower = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2)
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    ends = [steps.astype(np.int8).view(np.uint8), d.astype("<f2").view(np.uint8)]
    return np.concatenate([lower.reshape(len(x), -1), upper.reshape(len(x), -1), *ends], 1)


def _q5_0(values: Floats, search: Search, importance: Floats | None) -> Bytes:
    x = values.reshape(-1, 32)
    weights = x * x if importance is None else _grouped(values, importance, values.shape[1])[1]
    d = search(x, weights, 16 + _STEPS, 16)[0].astype(np.float16)
    q = np.rint(x * _inverse(d.astype(np.float32)[:, None]))
    q = (np.clip(q, -16, 15) + 16).astype(np.uint8)
    fifth = np.packbits(q >> 4, axis=-1, bitorder="little")
    head = d.astype("<f2").reshape(-1, 1).view(np.uint8)
    return np.concatenate([head, fifth, _halves(q & 15)], 1)


def _inverse(values: Floats) -> Floats:
    return np.divide(1, values, out=np.zeros_like(values), where=np.abs(values) > _TINY)
