"""The Llama family: Llama 1 to 3, SmolLM2, and Qwen2 with its biases on q, k and v."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from lite_runner.architectures import positions as rope
from lite_runner.architectures import spec
from lite_runner.architectures.spec import Decoder
from lite_runner.models.device_layers import attention_for, inputs_for, layers_for, linear
from lite_runner.models.layers import BuildOptions, CacheSize, Embedding, LastToken, Linear, Weights
from lite_runner.models.lora import Adapters, Lora, Step
from lite_runner.models.parallel import Combine, shared_logits, summed
from lite_runner.models.quantized import QuantizedLinear


class Rotary(nn.Cell):
    """cos and sin for the queries and keys of every layer, spread over the heads once a step."""

    def __init__(self, config: Decoder, length: int) -> None:
        super().__init__()
        rotary = config.rotary or spec.Rotary()
        frequencies, factor = rope.frequencies(rotary, config.head_dim)
        self.heads = config.num_heads + config.n_kv_heads
        self.head_dim = config.head_dim
        scaling = rotary.scaling
        self.dynamic = False
        if scaling is not None and scaling.type == "dynamic":
            self.dynamic = True
            self.frequencies = Tensor(frequencies)
            self.exponents = Tensor(rope.dynamic_exponents(config.head_dim))
            self.factor, self.original = scaling.factor, scaling.original_seq_length
        else:
            self._frequencies, self._factor = frequencies, factor
            self._tables(length)

    def resize(self, cache: CacheSize) -> None:
        if not self.dynamic:
            self._tables(cache.length)

    def _tables(self, length: int) -> None:
        angles = np.outer(np.arange(length, dtype=np.float32), self._frequencies)
        cos, sin = np.cos(angles) * self._factor, np.sin(angles) * self._factor
        self.cos = Tensor(np.concatenate([cos, cos], 1).astype(np.float32))
        self.sin = Tensor(np.concatenate([-sin, sin], 1).astype(np.float32))

    def construct(self, positions: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n], length [R] -> two times [n, heads, D]; sin's first half is negated."""
        if self.dynamic:
            cos, sin = self.stretched(positions, length)
        else:
            cos, sin = ops.gather(self.cos, positions, 0), ops.gather(self.sin, positions, 0)
        shape = (cos.shape[0], self.heads, self.head_dim)
        cos, sin = cos.reshape(-1, 1, self.head_dim), sin.reshape(-1, 1, self.head_dim)
        return ops.broadcast_to(cos, shape), ops.broadcast_to(sin, shape)

    def stretched(self, positions: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Dynamic NTK: the base grows with the row's own length once that is past the original."""
        length = ops.maximum(length.astype(ms.float32), float(self.original))
        ratio = length * (self.factor / self.original) - (self.factor - 1.0)
        frequencies = self.frequencies * ops.pow(ratio.reshape(-1, 1), self.exponents)
        count, half = frequencies.shape
        angles = positions.astype(ms.float32).reshape(count, -1, 1) * frequencies.reshape(
            count, 1, half
        )
        angles = angles.reshape(-1, half)
        cos, sin = ops.cos(angles), ops.sin(angles)
        return ops.concat((cos, cos), -1), ops.concat((-sin, sin), -1)


class LlamaBlock(nn.Cell):
    """Attention and SwiGLU, each behind an RMSNorm and added to the residual stream."""

    def __init__(
        self, config: Decoder, weights: Weights, prefix: str, options: BuildOptions
    ) -> None:
        super().__init__()

        def dense(
            name: str, has_bias: bool = False, combine: Combine | None = None
        ) -> Linear | QuantizedLinear:
            bias = weights(f"{prefix}.{name}.bias") if has_bias else None
            return linear(options, weights(f"{prefix}.{name}.weight"), bias, combine)

        def norm(name: str) -> nn.Cell:
            gamma = weights(f"{prefix}.{name}.weight")
            return layers_for(options, config).norm(gamma, config.norm_eps)

        self.head_dim = config.head_dim
        self.q_size = config.num_heads * config.head_dim
        self.attention_norm = norm("attention_norm")
        self.wq = dense("attention.wq", config.attention.qkv_bias)
        self.wk = dense("attention.wk", config.attention.qkv_bias)
        self.wv = dense("attention.wv", config.attention.qkv_bias)
        self.attention = attention_for(options, config)
        self.wo = dense("attention.wo", combine=summed(options.parallel))
        self.ffn_norm = norm("ffn_norm")
        self.w1 = dense("feed_forward.w1")  # gate
        self.w2 = dense("feed_forward.w2", combine=summed(options.parallel))  # down
        self.w3 = dense("feed_forward.w3")  # up
        self.side_by_side, self.swap = ops.Concat(1), ops.Concat(2)

        def lora(layers: dict[str, Linear | QuantizedLinear]) -> Lora:
            widths = {f"{prefix}.{name}.weight": layer.widths for name, layer in layers.items()}
            return Lora(options.lora, widths, options.dtype)

        qkv = {"wq": self.wq, "wk": self.wk, "wv": self.wv}
        self.qkv_lora = lora({f"attention.{name}": layer for name, layer in qkv.items()})
        self.wo_lora = lora({"attention.wo": self.wo})
        self.up_lora = lora({"feed_forward.w1": self.w1, "feed_forward.w3": self.w3})
        self.down_lora = lora({"feed_forward.w2": self.w2})

    def construct(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        bias: Tensor,
        slot: Tensor | None,
        step: Step | None,
    ) -> Tensor:
        h = self.attention_norm(x)
        to_q, to_k, to_v = self.qkv_lora(h, step)
        q, k = self.rotated(self.wq(h, to_q), self.wk(h, to_k), cos, sin)
        h = self.attention(q, k, self.wv(h, to_v), rows, bias, slot)
        x = x + self.wo(h, self.wo_lora(h, step)[0])
        h = self.ffn_norm(x)
        to_gate, to_up = self.up_lora(h, step)
        h = ops.silu(self.w1(h, to_gate)) * self.w3(h, to_up)
        return x + self.w2(h, self.down_lora(h, step)[0])

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary positions on queries and keys in one go; sin's first half is negated."""
        x = self.side_by_side((q, k)).reshape(cos.shape)
        half = self.head_dim // 2
        x = x * cos + self.swap((x[:, :, half:], x[:, :, :half])) * sin
        x = x.reshape(x.shape[0], -1)
        return x[:, : self.q_size], x[:, self.q_size :]


class LlamaModel(nn.Cell):
    """Tokens and their place -> logits after each row's last token."""

    def __init__(self, config: Decoder, weights: Weights, options: BuildOptions) -> None:
        super().__init__()
        cache = options.cache
        table = "model.tok_embeddings.embedding_weight"
        self.embedding = Embedding(options, weights(table))
        self.inputs = inputs_for(options, config)
        self.rotary = Rotary(config, config.seq_length if cache is None else cache.length)
        self.last = LastToken()
        self.blocks = nn.CellList(
            [
                LlamaBlock(config, weights, f"model.layers.{index}", options)
                for index in range(config.num_layers)
            ]
        )
        gamma = weights("model.norm_out.weight")
        self.norm = layers_for(options, config).norm(gamma, config.norm_eps)
        self.head = None
        if not config.tie_word_embeddings:
            weight = weights("lm_head.weight")
            whole = shared_logits(options.parallel, len(weight))
            self.head = Linear(options, weight, combine=whole)
        shape = (config.vocab_size, config.hidden_size)
        rows = len(self.embedding.weight) if self.head is None else self.head.widths[1]
        self.adapters = Adapters(options.lora, table, shape, rows, options.dtype)

    def construct(
        self,
        tokens: Tensor,
        position: Tensor,
        length: Tensor,
        slot: Tensor | None,
        place: Tensor | None = None,
        every: bool = False,
    ) -> Tensor:
        """tokens [R, T], position, length and place of the adapter [R] -> logits [R, vocab], or
        [n, vocab] after `every` token."""
        positions, rows, bias = self.inputs(tokens, position, length, slot)
        cos, sin = self.rotary(positions, length)
        step = self.adapters(place, tokens, slot)
        x = self.adapters.embedding(self.embedding(tokens), tokens, step)
        for block in self.blocks:
            x = block(x, cos, sin, rows, bias, slot, step)
        if slot is not None and not every:
            x = self.last(x, tokens, position, length)
        x = self.norm(x)
        added = self.adapters.head(x, step)[0]
        return self.embedding.logits(x, added) if self.head is None else self.head(x, added)
