"""GPT-2: learned positions."""

from __future__ import annotations

from dataclasses import replace

from mindspore import Tensor, nn

from lite_runner.architectures.spec import Decoder
from lite_runner.models.block import GPTBlock
from lite_runner.models.device_layers import inputs_for
from lite_runner.models.layers import (
    BuildOptions,
    Embedding,
    LastToken,
    LayerNorm,
    Weights,
)
from lite_runner.models.lora import Adapters


class GPT2Model(nn.Cell):
    """Tokens and their place -> logits after each row's last token."""

    def __init__(self, config: Decoder, weights: Weights, options: BuildOptions) -> None:
        super().__init__()

        def take(name: str, options: BuildOptions) -> Embedding:
            return Embedding(options, weights(f"backbone.embedding.{name}.embedding_table"))

        self.embedding = take("word_embedding", options)
        shape = (config.vocab_size, config.hidden_size)
        self.adapters = Adapters(
            options.lora,
            "backbone.embedding.word_embedding.embedding_table",
            shape,
            len(self.embedding.weight),
            options.dtype,
        )
        # Short, and so whole on every rank.
        self.position_embedding = take("position_embedding", replace(options, parallel=None))
        self.inputs = inputs_for(options, config)
        self.last = LastToken()
        self.blocks = nn.CellList(
            [
                GPTBlock(config, weights, f"backbone.blocks.{index}", options)
                for index in range(config.num_layers)
            ]
        )
        self.norm = LayerNorm(
            weights("backbone.layernorm.gamma"),
            weights("backbone.layernorm.beta"),
            config.norm_eps,
        )

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
        step = self.adapters(place, tokens, slot)
        x = self.adapters.embedding(self.embedding(tokens), tokens, step)
        x = x + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x, rows, bias, slot, step)
        if slot is not None and not every:
            x = self.last(x, tokens, position, length)
        x = self.norm(x)
        return self.embedding.logits(x, self.adapters.head(x, step)[0])
