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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.system.environment import cores
from lite_runner.weights.quantization.quantized import VALUES_AT_ONCE, QuantizedTensor, unpacked

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_TINY = np.float32(1e-30)
_UNSEEN = 1e-15  # so that products of two such weights exceed _TINY


def blocks_of(values: Floats, type_name: str, importance: Floats | None = None) -> Bytes:
    """A matrix [rows, columns] in blocks [rows, bytes of a row]; whole blocks make a row.
    `importance`: of each column."""
    own = {"Q4_K": _q4_k, "Q5_0": _q5_0, "Q6_K": _q6_k}
    if importance is not None:
        own |= {"Q4_0": _q4_0, "Q4_1": _q4_1}
    convert = own.get(type_name) or _by_library(type_name)
    step = max(1, VALUES_AT_ONCE // values.shape[1])
    parts = [values[start : start + step] for start in range(0, len(values), step)]
    with ThreadPoolExecutor(cores()) as pool:
        pieces = list(pool.map(lambda part: convert(part, importance), parts))
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


def _by_library(type_name: str) -> Callable[[Floats, Floats | None], Bytes]:
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType[type_name]
    return lambda values, _: quants.quantize(np.ascontiguousarray(values), kind)


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


def _q4_0(values: Floats, importance: Floats | None) -> Bytes:
    x, weights = _grouped(values, importance, values.shape[1])
    d = _symmetric(x, 8, weights).astype(np.float16)
    q = np.clip(np.rint(x * _inverse(d.astype(np.float32)[:, None])), -8, 7) + 8
    return np.concatenate([d.astype("<f2").reshape(-1, 1).view(np.uint8), _halves(q)], 1)


def _q4_1(values: Floats, importance: Floats | None) -> Bytes:
    x, weights = _grouped(values, importance, values.shape[1])
    d, low = (one.astype(np.float16) for one in _with_minimum(x, weights))
    wide = x + low.astype(np.float32)[:, None]
    q = np.clip(np.rint(wide * _inverse(d.astype(np.float32)[:, None])), 0, 15)
    heads = [one.astype("<f2").reshape(-1, 1).view(np.uint8) for one in (d, -low)]
    return np.concatenate([*heads, _halves(q)], 1)


def _halves(q: NDArray[Any]) -> Bytes:
    """Codes [n, 32], 0 to 15, two per byte, the first half in the lower bits."""
    codes = q.astype(np.uint8)
    pairs: Bytes = codes[:, :16] | codes[:, 16:] << np.uint8(4)
    return pairs


def _q4_k(values: Floats, importance: Floats | None) -> Bytes:
    x, weights = _grouped(values, importance, 256)
    x, weights = x.reshape(-1, 8, 32), weights.reshape(-1, 8, 32)
    scales, minimums = _with_minimum(x, weights)
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


def _with_minimum(x: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """The scales and negated minimums [...] of groups [..., n] whose integers 0 to 15 are
    nearest by these weights of errors; of 21 first scales each is fitted by least squares."""
    low = np.minimum(x.min(-1), 0)
    span = x.max(-1) - low
    weights_x = weights * x
    total, total_x = weights.sum(-1), weights_x.sum(-1)
    above_low = x - low[..., None]
    best: Floats = np.full(low.shape, np.inf, np.float32)
    scale, minimum = np.zeros_like(low), low
    for levels in (15, *np.arange(14, 16.05, 0.1, dtype=np.float32)):
        inverse = levels / np.maximum(span, _TINY)
        q = _rounded(inverse[..., None], above_low, 0, 15)
        sum_q, sum_qq, sum_qx = _dot(weights, q), _dot(weights, q, q), _dot(weights_x, q)
        spread = total * sum_qq - sum_q * sum_q
        safe = np.maximum(spread, _TINY)
        slope = (total * sum_qx - total_x * sum_q) / safe
        offset = (sum_qq * total_x - sum_q * sum_qx) / safe
        above = offset > 0
        slope = np.where(above, sum_qx / np.maximum(sum_qq, _TINY), slope)
        offset = np.where(above, 0, offset)
        q *= slope[..., None]
        q += offset[..., None]
        q -= x
        error = _dot(weights, q, q)
        won = (spread > 0) & (error < best)
        best = np.where(won, error, best)
        scale, minimum = np.where(won, slope, scale), np.where(won, offset, minimum)
    return np.maximum(scale, 0), -minimum


def _steps(values: Floats) -> tuple[Floats, Floats]:
    """Non-negative numbers [n, 8] as integers up to 63 times a float16 [n]."""
    largest = values.max(-1)
    d = (largest / 63).astype(np.float16).astype(np.float32)
    steps = np.minimum(np.rint(63 / np.maximum(largest, _TINY)[:, None] * values), 63)
    return d, steps


def _q6_k(values: Floats, importance: Floats | None) -> Bytes:
    x = values.reshape(-1, 16)
    weights = x * x
    if importance is not None:
        weights = _seen(_each(importance, values, 16), weights)
    x, weights = x.reshape(-1, 16, 16), weights.reshape(-1, 16, 16)
    scales = _symmetric(x, 32, weights)
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


def _q5_0(values: Floats, importance: Floats | None) -> Bytes:
    x, weights = _grouped(values, importance, values.shape[1])
    weights = x * x if importance is None else weights
    d = _symmetric(x, 16, weights).astype(np.float16)
    q = np.rint(x * _inverse(d.astype(np.float32)[:, None]))
    q = (np.clip(q, -16, 15) + 16).astype(np.uint8)
    fifth = np.packbits(q >> 4, axis=-1, bitorder="little")
    head = d.astype("<f2").reshape(-1, 1).view(np.uint8)
    return np.concatenate([head, fifth, _halves(q & 15)], 1)


def _symmetric(x: Floats, levels: int, weights: Floats) -> Floats:
    """The scales [...] of groups [..., n] whose integers -levels to levels - 1 are nearest by
    these weights of errors; the best of 19 first ones, fitted by least squares."""
    inverse = _inverse(np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1))
    weights_x = weights * x
    best = np.zeros(x.shape[:-1], np.float32)
    scale = np.zeros_like(best)
    for step in np.arange(-0.9, 0.95, 0.1, dtype=np.float32):
        q = _rounded(-(levels + step) * inverse, x, -levels, levels - 1)
        product, square = _dot(weights_x, q), _dot(weights, q, q)
        slope = np.divide(product, square, out=np.zeros_like(best), where=square > _TINY)
        won = slope * product > best
        best, scale = np.where(won, slope * product, best), np.where(won, slope, scale)
    return scale


def _rounded(inverse: Floats, x: Floats, least: int, most: int) -> Floats:
    """Integers nearest to x / scale."""
    q = inverse * x
    np.rint(q, out=q)
    np.clip(q, least, most, out=q)
    return q


def _dot(*factors: Floats) -> Floats:
    """The sums of products along the last axis."""
    found: Floats = np.einsum(",".join(["...i"] * len(factors)), *factors)
    return found


def _inverse(values: Floats) -> Floats:
    return np.divide(1, values, out=np.zeros_like(values), where=np.abs(values) > _TINY)
