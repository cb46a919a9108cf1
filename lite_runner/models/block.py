"""The block that BLOOM and GPT-2 share."""

from __future__ import annotations

from mindspore import Tensor, nn

from lite_runner.architectures.spec import Decoder
from lite_runner.models.device_layers import attention_for, linear
from lite_runner.models.layers import GELU, Array, BuildOptions, LayerNorm, Linear, Weights
from lite_runner.models.lora import Lora, Step
from lite_runner.models.parallel import Combine, summed
from lite_runner.models.quantized import QuantizedLinear
from lite_runner.weights.quantized import QuantizedTensor


class GPTBlock(nn.Cell):
    """Attention and a GELU feed-forward, each behind a LayerNorm and added to the residual.

    Parameters are found under `prefix`; the output projections are stored [in, out].
    """

    def __init__(
        self, config: Decoder, weights: Weights, prefix: str, options: BuildOptions
    ) -> None:
        super().__init__()

        def take(name: str) -> Array:
            return weights(f"{prefix}.{name}")

        def norm(name: str) -> LayerNorm:
            return LayerNorm(take(f"{name}.gamma"), take(f"{name}.beta"), config.norm_eps)

        def projection(name: str, combine: Combine | None = None) -> Linear | QuantizedLinear:
            weight: Array | QuantizedTensor = take(f"{name}.weight")
            if not isinstance(weight, QuantizedTensor):  # these are [out, in] all of them
                weight = weight.T
            return linear(options, weight, take(f"{name}.bias"), combine)

        def dense(name: str) -> Linear | QuantizedLinear:
            return linear(options, take(f"{name}.weight"), take(f"{name}.bias"))

        self.norm1 = norm("layernorm1")
        self.q = dense("attention.dense1")
        self.k = dense("attention.dense2")
        self.v = dense("attention.dense3")
        self.attention = attention_for(options, config)
        self.projection = projection("attention.projection", summed(options.parallel))
        self.norm2 = norm("layernorm2")
        self.up = projection("output.mapping")
        self.gelu = GELU()
        self.down = projection("output.projection", summed(options.parallel))

        def lora(layers: dict[str, Linear | QuantizedLinear]) -> Lora:
            widths = {f"{prefix}.{name}.weight": layer.widths for name, layer in layers.items()}
            return Lora(options.lora, widths, options.dtype)

        qkv = {"dense1": self.q, "dense2": self.k, "dense3": self.v}
        self.qkv_lora = lora({f"attention.{name}": layer for name, layer in qkv.items()})
        self.projection_lora = lora({"attention.projection": self.projection})
        self.up_lora = lora({"output.mapping": self.up})
        self.down_lora = lora({"output.projection": self.down})

    def construct(
        self, x: Tensor, rows: Tensor, bias: Tensor, slot: Tensor | None, step: Step | None
    ) -> Tensor:
        h = self.norm1(x)
        to_q, to_k, to_v = self.qkv_lora(h, step)
        q, k, v = self.q(h, to_q), self.k(h, to_k), self.v(h, to_v)
        h = self.attention(q, k, v, rows, bias, slot)
        x = x + self.projection(h, self.projection_lora(h, step)[0])
        h = self.norm2(x)
        h = self.gelu(self.up(h, self.up_lora(h, step)[0]))
        return x + self.down(h, self.down_lora(h, step)[0])
