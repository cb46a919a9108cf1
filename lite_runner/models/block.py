"""The block that BLOOM and GPT-2 share."""

from __future__ import annotations

import numpy as np
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

        def projection(name: str) -> Linear:
            return Linear(options, take(f"{name}.weight").T, take(f"{name}.bias"))

        parts = [f"attention.dense{part}" for part in (1, 2, 3)]
        self.size = config.hidden_size
        self.norm1 = norm("layernorm1")
        self.qkv = Linear(
            options,
            np.concatenate([take(f"{part}.weight") for part in parts]),
            np.concatenate([take(f"{part}.bias") for part in parts]),
        )
        self.attention = Attention(options, config.num_heads, config.n_kv_heads, config.head_dim)
        self.projection = projection("attention.projection")
        self.norm2 = norm("layernorm2")
        self.up = projection("output.mapping")
        self.gelu = GELU()
        self.down = projection("output.projection")

    def construct(self, x: Tensor, rows: Tensor, bias: Tensor, slot: Tensor | None) -> Tensor:
        qkv = self.qkv(self.norm1(x))
        size = self.size
        q, k, v = qkv[:, :size], qkv[:, size : 2 * size], qkv[:, 2 * size :]
        x = x + self.projection(self.attention(q, k, v, rows, bias, slot))
        return x + self.down(self.gelu(self.up(self.norm2(x))))
