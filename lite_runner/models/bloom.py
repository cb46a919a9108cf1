"""BLOOM: ALiBi in place of positions, and a LayerNorm right behind the embedding."""

from __future__ import annotations

from mindspore import Tensor, nn

from lite_runner.architectures.positions import alibi_slopes
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


class BloomModel(nn.Cell):
    """Tokens and their place -> logits after each row's last token."""

    def __init__(self, config: Decoder, weights: Weights, options: BuildOptions) -> None:
        super().__init__()

        def norm(name: str) -> LayerNorm:
            gamma, beta = weights(f"{name}.gamma"), weights(f"{name}.beta")
            return LayerNorm(gamma, beta, config.norm_eps)

        table = "embedding.word_embedding.embedding_table"
        self.embedding = Embedding(options, weights(table))
        shape = (config.vocab_size, config.hidden_size)
        rows = len(self.embedding.weight)
        self.adapters = Adapters(options.lora, table, shape, rows, options.dtype)
        self.embedding_norm = norm("embedding.norm")
        if options.parallel is None:
            slopes = alibi_slopes(config.num_heads)
        else:  # the config is of this rank's part
            heads = config.num_heads * options.parallel.ranks.tensor
            slopes = alibi_slopes(heads)[options.parallel.heads(config.num_heads)]
        self.inputs = inputs_for(options, config, slopes)
        self.last = LastToken()
        self.blocks = nn.CellList(
            [
                GPTBlock(config, weights, f"blocks.{index}", options)
                for index in range(config.num_layers)
            ]
        )
        self.norm = norm("ln_f")

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
        _, rows, bias = self.inputs(tokens, position, length, slot)
        step = self.adapters(place, tokens, slot)
        x = self.adapters.embedding(self.embedding(tokens), tokens, step)
        x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x, rows, bias, slot, step)
        if slot is not None and not every:
            x = self.last(x, tokens, position, length)
        x = self.norm(x)
        return self.embedding.logits(x, self.adapters.head(x, step)[0])
