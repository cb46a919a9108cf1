"""A model's network and the step graphs compiled from it."""

from __future__ import annotations

from collections.abc import Callable

from mindspore import Tensor, nn

from lite_runner.architectures import custom_network
from lite_runner.architectures.spec import Decoder
from lite_runner.networks.decoder import DecoderCell
from lite_runner.networks.layers import BuildOptions, Weights

Network = Callable[[Decoder, Weights, BuildOptions], nn.Cell]


def network_of(model: Decoder, weights: Weights, options: BuildOptions) -> nn.Cell:
    """The network of a model: a DecoderCell or its custom network."""
    own = custom_network(model)
    build = DecoderCell if own is None else own.network
    cell: nn.Cell = build(model, weights, options)
    return cell


class _Step(nn.Cell):
    """A step graph; the network's parameters keep their names."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network


class Prefill(_Step):
    """Rows of any number of tokens, each with its cache slot."""

    def construct(self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor) -> Tensor:
        return self.network(tokens, position, length, slot)


class Decode(_Step):
    """One token for every slot.

    MindSpore's PagedAttention reads the lengths on the host, from the graph input of exactly this
    name; lengths computed inside the graph are not seen.
    """

    def construct(self, tokens: Tensor, position: Tensor, batch_valid_length: Tensor) -> Tensor:
        return self.network(tokens, position, batch_valid_length, None)


class Score(_Step):
    """Prefill of one row with logits after every token [T, vocab]."""

    def construct(self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor) -> Tensor:
        return self.network(tokens, position, length, slot, None, True)


class LoraScore(_Step):
    """As Score, with the row's adapter slot [1], below 0 the base model."""

    def construct(
        self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor, adapter_slot: Tensor
    ) -> Tensor:
        return self.network(tokens, position, length, slot, adapter_slot, True)


class LoraPrefill(_Step):
    """Prefill of one row with its adapter slot [1], below 0 the base model."""

    def construct(
        self, tokens: Tensor, position: Tensor, length: Tensor, slot: Tensor, adapter_slot: Tensor
    ) -> Tensor:
        return self.network(tokens, position, length, slot, adapter_slot)


class LoraDecode(_Step):
    """As Decode, with adapter slots [slots], below 0 the base model."""

    def construct(
        self, tokens: Tensor, position: Tensor, batch_valid_length: Tensor, adapter_slot: Tensor
    ) -> Tensor:
        return self.network(tokens, position, batch_valid_length, None, adapter_slot)
