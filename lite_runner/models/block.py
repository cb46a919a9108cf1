"""The block that BLOOM and GPT-2 share."""

from __future__ import annotations

from mindspore import Tensor, nn

from lite_runner.config.model import ModelConfig
from lite_runner.models.layers import (
    GELU,
    Array,
    Attention,
    BuildOptions,
    LayerNorm,
    Linear,
    Weights,
)
from lite_runner.models.parallel import Combine, summed


class GPTBlock(nn.Cell):
    """Attention and a GELU feed-forward, each behind a LayerNorm and added to the residual.

    Parameters are found under `prefix`; the output projections are stored [in, out].
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, options: BuildOptions
    ) -> None:
        super().__init__()

        def take(name: str) -> Array:
            return weights(f"{prefix}.{name}")

        def norm(name: str) -> LayerNorm:
            return LayerNorm(take(f"{name}.gamma"), take(f"{name}.beta"), config.norm_eps)

        def projection(name: str, combine: Combine | None = None) -> Linear:
            return Linear(options, take(f"{name}.weight").T, take(f"{name}.bias"), combine)

        def dense(name: str) -> Linear:
            return Linear(options, take(f"{name}.weight"), take(f"{name}.bias"))

        self.norm1 = norm("layernorm1")
        self.q = dense("attention.dense1")
        self.k = dense("attention.dense2")
        self.v = dense("attention.dense3")
        self.attention = Attention(options, config.num_heads, config.n_kv_heads, config.head_dim)
        self.projection = projection("attention.projection", summed(options.parallel))
        self.norm2 = norm("layernorm2")
        self.up = projection("output.mapping")
        self.gelu = GELU()
        self.down = projection("output.projection", summed(options.parallel))

    def construct(self, x: Tensor, rows: Tensor, bias: Tensor, slot: Tensor | None) -> Tensor:
        h = self.norm1(x)
        h = self.attention(self.q(h), self.k(h), self.v(h), rows, bias, slot)
        x = x + self.projection(h)
        return x + self.down(self.gelu(self.up(self.norm2(x))))
