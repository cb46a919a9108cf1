"""Quantized linear layers with MindSpore's fused operators for Ascend.

They compute (q + offset) * scale, with scale and offset in the type of x, per column of the weight
or per group. They support at most 65535 outputs, which vocabularies exceed: embedding and head use
dequantized weights.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.auto_generate import (
    DynamicQuantExt,
    QuantBatchMatmul,
    WeightQuantBatchMatmul,
)
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.networks.layers import Array, BuildOptions, parameter
from lite_runner.networks.tensor_parallel import Combine
from lite_runner.weights.quantization.quantized import QuantizedTensor, packed, quantize, unpacked
from lite_runner.weights.read_ahead import QuantizedWeights
from lite_runner.weights.tensor import widened


class LinearIntegers:
    """A network's weights by name, each taken once: quantized for linear layers if available."""

    def __init__(self, weights: QuantizedWeights, config: Decoder) -> None:
        table = parameters(config)
        self._weights = weights
        self._ends = {table[0].name, "lm_head.weight"}
        self._linear = {one.name: one.layout for one in table if one.layout != "plain"}

    def __call__(self, name: str) -> Any:
        """A QuantizedTensor [out, in], or float32 as `layouts` has it."""
        if name not in self._linear and name not in self._ends:
            return self._weights.vector(name)
        values = self._weights.matrix(name)
        if isinstance(values, QuantizedTensor):
            return values if name in self._linear else values.float32()
        floats = widened(values) if isinstance(values, np.ndarray) else values.float32()
        return floats.T if self._linear.get(name) == "in_out" else floats


def integers(values: NDArray[np.int8], name: str) -> Parameter:
    return Parameter(Tensor.from_numpy(np.ascontiguousarray(values)), name, False)


def nibbles(values: NDArray[np.int8], name: str) -> Parameter:
    """Packed 4-bit pairs as MindSpore's qint4x2; the shape is that of the bytes."""
    return Parameter(Tensor(values, dtype=ms.qint4x2), name, False)


def signed_nibbles(weight: QuantizedTensor) -> tuple[NDArray[np.int8], Array, Array]:
    """4-bit weights as (q + offset) * scale: q from -8 to 7 [in, out / 2], two outputs per byte,
    the even one in the low nibble; scales and offsets [groups, out].

    A group of equal values has no scale: its value becomes the scale, with q = -8.
    """
    assert weight.minimums is not None  # 4-bit weights have them
    scales = weight.scales.astype(np.float32)
    minimums = weight.minimums.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        offsets = minimums / scales + 8
    # Such an offset would overflow float16: the group is constant to its precision.
    level = ~(np.abs(offsets) < 60000)
    scales = np.where(level, minimums / -8, scales)
    offsets = np.where(level, 0, offsets)
    q = unpacked(weight.values)  # type: ignore[arg-type]
    grouped = q.reshape(len(q), -1, weight.group)
    grouped[level] = 0
    # Two's complement: adding 8 to 0..15 within four bits turns q into q - 8.
    pairs = packed(np.ascontiguousarray((q ^ 8).T))
    return pairs.view(np.int8), scales.T, offsets.T


class WeightQuantProduct(nn.Cell):
    """x [n, in] by a quantized weight [out, in] -> [n, out], in the type of `options`."""

    def __init__(self, options: BuildOptions, weight: QuantizedTensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        grouped = weight.group not in (0, columns)  # one group means none to the operator
        offsets = None
        if weight.bits == 4:
            pairs, scales, offsets = signed_nibbles(weight)
            self.weight = nibbles(pairs, "weight")
        else:
            values: NDArray[Any] = weight.values
            self.weight = integers(values.T if grouped else values, "weight")
            scales = weight.scales.reshape(rows, -1).T
        if not grouped:
            scales = scales[0]
            offsets = None if offsets is None else offsets[0]
        self.scales = parameter(scales, "scales", options.dtype)
        self.offsets = None if offsets is None else parameter(offsets, "offsets", options.dtype)
        # Layout of the weight: [out, in] is faster per column, [in, out] per group.
        out_major = weight.bits == 8 and not grouped
        group = weight.group if grouped else 0
        self.matmul = WeightQuantBatchMatmul(False, out_major, group)

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.scales, self.offsets, None, None, None)


class IntegerProduct(nn.Cell):
    """As WeightQuantProduct with int8 inputs: each row of x is quantized with its own scale."""

    def __init__(self, options: BuildOptions, weight: QuantizedTensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        if weight.group not in (0, columns):
            # The operator has no groups: group-quantized weights are requantized per row.
            weight = quantize(weight.float32(), 8, 0)
        values: NDArray[Any] = weight.values
        self.weight = integers(values, "weight")
        self.scales = parameter(weight.scales.reshape(rows), "scales")
        self.round = DynamicQuantExt()
        self.matmul = QuantBatchMatmul(False, True, options.dtype)

    def construct(self, x: Tensor) -> Tensor:
        q, scales = self.round(x, None)
        return self.matmul(q, self.weight, self.scales, None, None, scales)


class QuantizedLinear(nn.Cell):
    """As Linear, with a quantized weight."""

    def __init__(
        self,
        options: BuildOptions,
        weight: QuantizedTensor,
        bias: Array | None = None,
        combine: Combine | None = None,
    ) -> None:
        super().__init__()
        self.widths = weight.shape[::-1]
        kind = IntegerProduct if options.integer_input and weight.bits == 8 else WeightQuantProduct
        self.product = kind(options, weight)
        self.bias = None if bias is None else parameter(bias, "bias")
        self.dtype = options.dtype
        self.add = ops.BiasAdd()
        self.combine = combine

    def construct(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """`added` [n, out]: this rank's LoRA delta."""
        y = self.product(x.astype(self.dtype)).astype(ms.float32)
        if added is not None:
            y = y + added
        if self.combine is not None:
            y = self.combine(y)
        return y if self.bias is None else self.add(y, self.bias)
