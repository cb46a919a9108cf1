"""Selects a network's layers: stock operators, or Ascend's fused ones."""

from __future__ import annotations

from collections.abc import Callable

from mindspore import nn

from lite_runner.architectures.spec import Decoder
from lite_runner.networks.ascend_layers import FusedAttention, FusedRMSNorm, PagedInputs, supports
from lite_runner.networks.experts import Mixture as Mixture
from lite_runner.networks.layers import (
    Array,
    Attention,
    BuildOptions,
    Linear,
    RMSNorm,
    StepInputs,
)
from lite_runner.networks.quantized_layers import QuantizedLinear
from lite_runner.networks.tensor_parallel import Combine
from lite_runner.records import dataclass
from lite_runner.weights.quantization.quantized import QuantizedTensor


@dataclass(frozen=True)
class Layers:
    """Cell classes of a network."""

    norm: Callable[[Array, float], nn.Cell]
    inputs: Callable[[BuildOptions, int, int, Array | None, int | None], nn.Cell]
    attention: Callable[[BuildOptions, int, int, int, float | None], nn.Cell]


def _step_inputs(
    options: BuildOptions, heads: int, kv_heads: int, slopes: Array | None, window: int | None
) -> StepInputs:
    return StepInputs(heads, kv_heads, options.cache, slopes, window)


STOCK = Layers(RMSNorm, _step_inputs, Attention)
FUSED = Layers(FusedRMSNorm, PagedInputs, FusedAttention)


def layers_for(options: BuildOptions, config: Decoder) -> Layers:
    """The fused layers if the device has them and they support this network."""
    return FUSED if options.fused and supports(options.dtype, config) else STOCK


def inputs_for(
    options: BuildOptions, config: Decoder, slopes: Array | None, window: int | None
) -> nn.Cell:
    """See StepInputs; `slopes` [H]: ALiBi's; `window`: sliding window of these layers."""
    build = layers_for(options, config).inputs
    return build(options, config.num_heads, config.n_kv_heads, slopes, window)


def attention_for(options: BuildOptions, config: Decoder, softcap: float | None) -> nn.Cell:
    """See Attention."""
    build = layers_for(options, config).attention
    return build(options, config.num_heads, config.n_kv_heads, config.head_dim, softcap)


def linear(
    options: BuildOptions,
    weight: Array | QuantizedTensor,
    bias: Array | None = None,
    combine: Combine | None = None,
) -> Linear | QuantizedLinear:
    """See Linear; `weight` [out, in] may be quantized if the device has the operators."""
    if isinstance(weight, QuantizedTensor):
        return QuantizedLinear(options, weight, bias, combine)
    return Linear(options, weight, bias, combine)
