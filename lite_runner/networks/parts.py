"""The cells that a network is built of, each made from its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from lite_runner.architectures import by_expert, by_role
from lite_runner.architectures.naming import Part, Role
from lite_runner.architectures.spec import Attention as AttentionSpec
from lite_runner.architectures.spec import Decoder, FeedForward, Norm
from lite_runner.networks.ascend_layers import (
    TYPES,
    FusedAttention,
    FusedRMSNorm,
    GroupedMixture,
    PagedInputs,
    QuantizedLinear,
    supports,
)
from lite_runner.networks.layers import (
    Array,
    Attention,
    BuildOptions,
    DenseMixture,
    Gate,
    LayerNorm,
    Linear,
    MixtureBiases,
    RMSNorm,
    StepInputs,
    Weights,
    parameter,
)
from lite_runner.networks.lora import Lora, NoLora, lora_of
from lite_runner.networks.tensor_parallel import Combine
from lite_runner.records import dataclass
from lite_runner.weights.quantization.quantized import QuantizedTensor


@dataclass(frozen=True)
class Layers:
    """Cell classes of a network."""

    norm: Callable[[Array, float], nn.Cell]
    inputs: Callable[[BuildOptions, int, int, Array | None, int | None], nn.Cell]
    attention: Callable[[BuildOptions, int, int, int, float | None, Array | None], nn.Cell]


def _step_inputs(
    options: BuildOptions, heads: int, kv_heads: int, slopes: Array | None, window: int | None
) -> StepInputs:
    return StepInputs(heads, kv_heads, options.cache, slopes, window)


STOCK = Layers(RMSNorm, _step_inputs, Attention)
FUSED = Layers(FusedRMSNorm, PagedInputs, FusedAttention)


def layers_for(options: BuildOptions, config: Decoder) -> Layers:
    """The fused layers if the device has them and they support this network."""
    return FUSED if options.fused and supports(options.dtype, config) else STOCK


Dense: TypeAlias = Linear | QuantizedLinear


class WithShared(nn.Cell):
    """A mixture of experts, and a gated network that every token takes besides."""

    def __init__(
        self, routed: nn.Cell, gated: Gate, own: list[Dense], factor: Linear | None
    ) -> None:
        """`own`: gate, up and down; `factor` [1, hidden]: of the logit of what is taken of it."""
        super().__init__()
        self.routed, self.gated, self.factor = routed, gated, factor
        self.shared_gate, self.shared_up, self.shared_down = own

    def construct(self, x: Tensor) -> Tensor:
        """x [n, hidden] -> [n, hidden]."""
        y = self.shared_down(self.gated(self.shared_gate(x), self.shared_up(x)))
        if self.factor is not None:
            y = y * ops.sigmoid(self.factor(x))
        return self.routed(x) + y


class Parts:
    """Builds a model's cells from the weights of a role and layer."""

    def __init__(self, model: Decoder, weights: Weights, options: BuildOptions) -> None:
        self.model, self.options = model, options
        self._weights = weights
        self._parameters, self._experts = by_role(model), by_expert(model)
        self._biases = by_expert(model, "bias")
        self.layers = layers_for(options, model)

    def name(self, role: Role, layer: int | None = None) -> str:
        """Canonical name of a weight."""
        return self._parameters[role, layer, "weight"].name

    def tensor(self, role: Role, layer: int | None = None, kind: Part = "weight") -> Array:
        return self._weights(self._parameters[role, layer, kind].name)

    def norm(self, norm: Norm | None, role: Role, layer: int | None = None) -> nn.Cell | None:
        """None where the model has no such norm."""
        if norm is None:
            return None
        if not norm.gain:  # norm of heads
            return self.layers.norm(np.ones(self.model.head_dim, np.float32), norm.eps)
        gain = self.tensor(role, layer)
        if norm.kind == "layer":
            shift = self.tensor(role, layer, "bias") if norm.bias else np.zeros_like(gain)
            return LayerNorm(gain, shift, norm.eps)
        return self.layers.norm(gain, norm.eps)

    def apart(self, given: AttentionSpec, role: Role, layer: int) -> tuple[nn.Cell, Parameter]:
        """A norm of heads without weights, and those of all heads [1, heads * head_dim]."""
        assert given.qk_norm is not None
        gain, one = self.tensor(role, layer), np.ones(given.head_dim, np.float32)
        eps, name = given.qk_norm.eps, "query_gain" if role == "query_norm" else "key_gain"
        plain = RMSNorm(one, eps) if given.qk_norm.kind == "rms" else LayerNorm(one, one * 0, eps)
        return plain, parameter(gain.reshape(1, -1), name)

    def dense(self, role: Role, layer: int, *, bias: bool, combine: Combine | None = None) -> Dense:
        weight: Array | QuantizedTensor = self.tensor(role, layer)
        transposed = self._parameters[role, layer, "weight"].transposed
        if transposed and not isinstance(weight, QuantizedTensor):  # quantized: always [out, in]
            weight = weight.T
        bias_of = self.tensor(role, layer, "bias") if bias else None
        if isinstance(weight, QuantizedTensor):
            return QuantizedLinear(self.options, weight, bias_of, combine)
        return Linear(self.options, weight, bias_of, combine)

    def mixture(self, given: FeedForward, layer: int, combine: Combine | None) -> nn.Cell:
        experts = given.experts
        assert experts is not None

        def every(role: Role) -> list[Array]:
            return [self._weights(one.name) for one in self._experts[role, layer]]

        def biases_of(role: Role) -> list[Array] | None:
            if (role, layer) not in self._biases:
                return None
            return [self._weights(one.name) for one in self._biases[role, layer]]

        def of_all(biases: list[Array] | None) -> Array | None:
            return None if biases is None else np.concatenate(biases)

        router, gates = self.tensor("router", layer), every("expert_gate")
        downs, ups = every("expert_down"), every("expert_up")
        fused = self.options.fused and self.options.dtype in TYPES and not given.biased_down
        fused = fused and not experts.scaled_inputs
        build = GroupedMixture if fused else DenseMixture
        down_biases = biases_of("expert_down")
        biases = MixtureBiases(
            self.tensor("router", layer, "bias") if experts.router_bias else None,
            self.tensor("choice_bias", layer, "bias") if experts.choice_bias else None,
            of_all(biases_of("expert_gate")),
            of_all(biases_of("expert_up")),
            None if down_biases is None else np.stack(down_biases),
        )
        routed = build(self.options, given, router, gates, ups, downs, combine, biases)
        if not experts.shared:
            return routed
        roles: tuple[Role, ...] = ("shared_gate", "shared_up", "shared_down")
        own = [self.dense(role, layer, bias=False) for role in roles]
        factor = None
        if experts.shared_gate:
            factor = Linear(self.options, self.tensor("shared_router", layer))
        return WithShared(routed, Gate(given), own, factor)

    def lora(self, layer: int, cells: dict[Role, Dense]) -> Lora | NoLora:
        """The LoRA deltas of layers that share an input."""
        widths = {self.name(role, layer): cell.widths for role, cell in cells.items()}
        return lora_of(self.options.lora, widths, self.options.dtype)
