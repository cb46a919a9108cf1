"""Scales of channels: what multiplies the columns of matrices divides what their inputs come from,
a norm's weights or the rows of another matrix, so that a model computes the same and quantizes with
a smaller error.

AWQ (J. Lin et al., arXiv:2306.00978) gives more steps to the columns with large inputs, by the
power of their size at which 4 bits change the outputs least. SmoothQuant (G. Xiao et al.,
arXiv:2211.10438) makes inputs as even as weights, of which both are rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, by_role
from lite_runner.architectures.naming import Part, Role
from lite_runner.architectures.spec import Decoder
from lite_runner.records import dataclass
from lite_runner.weights import narrowed, widened
from lite_runner.weights.quantization.calibration import Floats, Inputs, Layer, Product
from lite_runner.weights.quantization.quantized import QuantizedTensor

Scaling = Literal["awq", "smoothquant"]
POWERS = np.linspace(0, 1, 11)[:-1]  # of the input magnitudes, tried by AWQ
ROWS = 256  # sampled evenly from a matrix at most, to choose the power by their errors
MIGRATED = 0.5  # SmoothQuant's power of inputs and weights
LEAST = 1e-4  # of the largest magnitude: the lower bound of all others


@dataclass(frozen=True)
class _Place:
    """A place where channels are scaled."""

    before: tuple[Parameter, ...]  # weight and bias of the norm or matrix before them
    after: tuple[Parameter, ...]  # the matrices that multiply them
    heads: tuple[int, int] = (1, 1)  # those that share each channel: groups, of so many

    def shared(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Magnitudes of the inputs reduced to the channels of `before`."""
        groups, each = self.heads
        found: NDArray[np.float64] = sizes.reshape(groups, each, -1).max(1).reshape(-1)
        return found

    def repeated(self, scales: Floats) -> Floats:
        """The inverse of `shared`."""
        groups, each = self.heads
        return np.repeat(scales.reshape(groups, 1, -1), each, axis=1).reshape(-1)


def _places(model: Decoder, layer: int) -> Iterator[_Place]:
    """The places of a layer, the last first: a matrix's columns are scaled before its rows."""
    block, table = model.blocks[layer], by_role(model)
    given, inner = block.attention, block.feed_forward

    def of(*roles: Role, kinds: Sequence[Part] = ("weight",)) -> tuple[Parameter, ...]:
        keys = ((role, layer, kind) for role in roles for kind in kinds)
        return tuple(table[key] for key in keys if key in table)

    both: Sequence[Part] = ("weight", "bias")
    dense = block.only != "mixer" and inner.experts is None
    plain = block.norm is not None and block.norm.gain and block.normed_residual is None
    wide = of("gate", "up") if dense else ()
    if dense and inner.gated and inner.limit is None:
        yield _Place(of("up", kinds=both), of("down"))
    if plain and dense and not block.shared_norm:
        yield _Place(of("feed_forward_norm", kinds=both), wide)
    if not block.attends or given.latent is not None:
        return
    if not given.values_are_keys and given.value_norm is None and given.clip is None:
        heads = given.kv_heads, given.heads // given.kv_heads
        yield _Place(of("value", kinds=both), of("attention_out"), heads)
    if plain and (dense or not block.shared_norm):
        inward = () if given.placed_query else of("query")
        inward += of("key", "value") + (wide if block.shared_norm else ())
        yield _Place(of("attention_norm", kinds=both), inward)


# Values, name and the sums of squares of the inputs of a matrix -> its integers.
Nearest = Callable[[Floats, str, NDArray[np.float64]], QuantizedTensor]


def scale_channels(
    layer: Layer,
    model: Decoder,
    index: int,
    method: Scaling,
    nearest: Nearest,
    product: Product,
    fixed: Container[str],
) -> set[Parameter]:
    """Scale channels of a layer that has seen its inputs; returns the changed tensors.

    Matrices whose names are `fixed` stay as they are.
    """
    changed: set[Parameter] = set()
    for place in _places(model, index):
        every = *place.before, *place.after
        inputs = layer.matrix(place.after[0]).inputs
        # SmoothQuant scales only norms.
        if method == "smoothquant" and place.before[0].is_linear:
            continue
        if inputs is None or any(one.name in fixed for one in every):
            continue
        if method == "awq":
            scales = _searched(place, layer, inputs, nearest, product)
        else:
            scales = _migrated(place, layer, inputs)
        gain = layer.values(place.before[0])
        if gain.ndim == 1:  # a norm's weights; rounded, as some formats store them in 16 bits
            short = widened(narrowed(gain / scales, "BF16"))
            scales = np.divide(gain, short, out=scales, where=short != 0)
        wide = place.repeated(scales)
        for one in place.after:
            layer.set(one, layer.values(one) * wide)
        inputs.divide(wide)
        for one in place.before:
            values = layer.values(one)
            layer.set(one, values / scales.reshape(-1, *(1,) * (values.ndim - 1)))
        changed.update(every)
    return changed


def _at_least(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(sizes, max(LEAST * sizes.max(), 1e-30))


def _migrated(place: _Place, layer: Layer, inputs: Inputs) -> Floats:
    columns = np.max([np.abs(layer.values(one)).max(0) for one in place.after], axis=0)
    largest, weight = (
        _at_least(place.shared(one.astype(np.float64))) for one in (inputs.largest, columns)
    )
    return (largest**MIGRATED / weight ** (1 - MIGRATED)).astype(np.float32)


def _searched(
    place: _Place, layer: Layer, inputs: Inputs, nearest: Nearest, product: Product
) -> Floats:
    """The scales with the least error of outputs, which is 1 throughout where none is better."""
    squares, gram = np.diagonal(inputs.gram), inputs.gram.astype(np.float32)
    sizes = _at_least(np.sqrt(place.shared(squares)))
    best, least = np.ones(len(sizes), np.float32), np.inf
    for power in POWERS:
        scales = sizes**power
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        wide, error = place.repeated(scales), 0.0
        for one in place.after:
            values = layer.values(one)
            step = -(-len(values) // ROWS)
            values = values[::step]
            found = nearest(values * wide, one.name, squares / np.square(wide)).float32()
            missed = found / wide - values
            error += step * float((product(missed, gram) * missed).sum())
        if error < least:
            best, least = scales, error
    return best
