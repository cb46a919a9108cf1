"""Mixed precision: which linear layers have 8 bits in place of 4, by measured error.

Of each layer of the model all matrices are rounded to 4 bits: how far that moves the distribution
over the vocabulary is a KL divergence. The matrices that share it are one for the native operators
too (q, k and v; gate and up), and each alone moves the layer's outputs by some part of it. Those
with the largest divergence for the bytes that 8 bits take more come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.quantization import Quantization, Scheme, schemes
from lite_runner.architectures.reference import Weights, capped, norm
from lite_runner.architectures.spec import Decoder
from lite_runner.weights import LazyTensor
from lite_runner.weights.quantization.calibration import Floats, Layer, Product
from lite_runner.weights.quantization.quantize import TOGETHER
from lite_runner.weights.quantization.quantized import quantize_to_4_bits

_Costs = dict[tuple[Parameter, ...], float]


def finer_matrices(costs: _Costs, low: Scheme, high: Scheme, bits: float) -> tuple[str, ...]:
    """The names of the matrices in the `high` format where all others have the `low` one, so that a
    weight has up to this many `bits`, scales counted."""
    small, large = ({ours: _bytes(ours, one) for ours in costs} for one in (low, high))
    weights = sum(math.prod(one.shape) for ours in costs for one in ours)
    left = bits / 8 * weights - sum(small.values())
    more = {ours: large[ours] - small[ours] for ours in costs}
    found: list[str] = []
    for ours in sorted(costs, key=lambda ours: costs[ours] / more[ours], reverse=True):
        if more[ours] <= left:
            left -= more[ours]
            found += [one.name for one in ours]
    return tuple(sorted(found))


def measured_costs(
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    quantization: Quantization,
    texts: NDArray[np.int32],
    *,
    around_zero: bool,
    product: Product = np.matmul,
    advance: Callable[[int], None] = lambda count: None,
) -> _Costs:
    """The divergence that 4 bits cost of the matrices that go together, over the token ids of
    `texts` [n, T]. A layer at a time is in memory as floats, beside what comes out of it of each
    layer rounded before; `advance` is called for each. Raises ArtifactError."""
    table, wanted = parameters(model), schemes(model, quantization)
    streams: list[Sequence[Floats | None]] = [[None] * len(texts)]  # exact; with each layer rounded
    shares: list[_Costs] = []
    for index, block in enumerate(model.blocks):
        own = {one: tensors[one.name] for one in table if one.layer == index}
        layer = Layer(model, block, own, tensors, product=product)

        def run(states: Sequence[Floats | None], layer: Layer = layer) -> list[Floats]:
            return [layer.run(text, state) for text, state in zip(texts, states, strict=True)]

        together: dict[str | None, list[Parameter]] = {}
        for one in own:
            if one.is_linear and one.name in wanted:
                together.setdefault(TOGETHER.get(one.role, one.role), []).append(one)
        after = [run(states) for states in streams]
        share: _Costs = {}
        rounded: dict[Parameter, Floats] = {}
        for ours in map(tuple, together.values()):
            exact = {one: layer.matrix(one).values for one in ours}
            for one, values in exact.items():
                group = wanted[one.name].group
                found = quantize_to_4_bits(values, group, one.name, around_zero=around_zero)
                rounded[one] = found.float32()
                layer.matrix(one).replace(rounded[one])
            moved = zip(run(streams[0]), after[0], strict=True)
            share[ours] = sum(float(np.square(a - b).sum()) for a, b in moved)
            for one, values in exact.items():
                layer.matrix(one).replace(values)
        for one, values in rounded.items():
            layer.matrix(one).replace(values)
        streams = [*after, run(streams[0])]
        shares.append(share)
        advance(1)
    divergences = _divergences(tensors, model, streams, product)
    return {
        ours: divergence * one / (sum(share.values()) or 1)
        for share, divergence in zip(shares, divergences, strict=True)
        for ours, one in share.items()
    }


def _divergences(
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    streams: Sequence[Sequence[Floats | None]],
    product: Product,
) -> list[float]:
    """KL divergences of each stream's distributions over the vocabulary from the first stream's."""
    end = replace(model, blocks=())
    unread = np.empty((1, 1), np.float32)  # tables; the one needed is read below
    weights = Weights(
        end,
        {
            one.name: tensors[one.name].float32()
            if one.role == "norm" or one.kind == "bias"
            else unread
            for one in parameters(end)
        },
    )
    role = "embedding" if model.tie_word_embeddings else "head"
    one = next(one for one in parameters(end) if one.role == role and one.kind == "weight")
    head = tensors[one.name].float32()
    head = head if one.transposed else head.T

    def distribution(state: Floats | None) -> Floats:
        assert state is not None
        normed = norm(model.norm, state.astype(np.float64), weights, "norm").astype(np.float32)
        logits = product(normed, head)
        if model.head_bias:
            logits = logits + weights["head", None, "bias"]
        logits = capped(logits / model.logits_scaling, model.logits_softcap).astype(np.float32)
        logits -= logits.max(-1, keepdims=True)
        found: Floats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return found

    sums = np.zeros(len(streams) - 1)
    for text, state in enumerate(streams[0]):
        exact = distribution(state)
        weight = np.exp(exact)
        for place, other in enumerate(streams[1:]):
            sums[place] += (weight * (exact - distribution(other[text]))).sum()
    return [float(each) for each in sums]


def _bytes(ours: tuple[Parameter, ...], scheme: Scheme) -> int:
    return sum(scheme.nbytes(*(one.shape[::-1] if one.transposed else one.shape)) for one in ours)
