"""The network of the native CPU kernels, which has three operators.

A step takes any number of tokens up to its capacity, of any slots: prompts and new tokens together
(continuous batching). Tokens beyond the live ones are neither read nor written, so one graph serves
all steps.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.native import LIBRARY
from lite_runner.native.kv_cache import cache_shapes
from lite_runner.native.layout import aligned
from lite_runner.native.lora_pool import PoolLayout
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import Weights, pack
from lite_runner.native.versions import format_of


def _parameter(block: NDArray[np.generic], name: str) -> Parameter:
    # MindSpore copies unless it gets the only reference to the tensor, by position.
    return Parameter(Tensor.from_numpy(block), name, False)


def _zeros(shape: tuple[int, ...], dtype: type[np.generic], name: str) -> Parameter:
    return _parameter(np.zeros(shape, dtype), name)


def _pool(slots: int, layout: PoolLayout | None) -> NDArray[np.generic]:
    if layout is None:
        return np.zeros((1, 1), np.float32)
    size = slots * layout.width * np.dtype(layout.dtype).itemsize
    return aligned(size).view(layout.dtype).reshape(slots, layout.width)


def _operator(name: str, width: int, rows: int) -> ops.Custom:
    """One of the operators; its output is float32 [rows, width]."""
    return ops.Custom(
        f"{LIBRARY}:{name}",
        out_shape=lambda *shapes: (rows, width),
        out_dtype=lambda *types: ms.float32,
        func_type="aot",
    )


def head_operator(model: Decoder) -> str:
    """The operator of the model's head."""
    return "Head" if model.logits_softcap is None else "CappedHead"


class NativeNetwork(nn.Cell):
    """State shared by steps of all capacities: packed weights, the KV cache (see cache_shapes), and
    adapter pools."""

    def __init__(self, config: Decoder, weights: Weights, options: NativeOptions) -> None:
        super().__init__()
        self.hidden, self.vocab = config.hidden_size, config.vocab_size
        self.head = head_operator(config)
        self._config = config
        layers = pack(
            config,
            weights,
            options.lora,
            rounded_input=options.rounded_input,
            dequantize=options.dequantize,
        )
        self.layers = ParameterTuple(
            _parameter(layer.block, f"layer{index}") for index, layer in enumerate(layers)
        )
        self.format = format_of(layer.block for layer in layers[1:-1])
        self.format = max(self.format, *(layer.since for layer in layers))
        # Per layer: adapter pool [slots, width]; a single element if it is not targeted.
        self.layouts: list[PoolLayout | None] = [layer.adapters for layer in layers]
        slots = 0 if options.lora is None else options.lora.slots
        self.pools = ParameterTuple(
            _parameter(_pool(slots, layout), f"pool{index}")
            for index, layout in enumerate(self.layouts)
        )

    def resize(self, options: NativeOptions) -> None:
        """Reallocate the caches, empty, for these options."""
        shapes = cache_shapes(self._config, options.slots, options.length, options.cache)
        self.keys, self.values, self.key_scales, self.value_scales = (
            ParameterTuple(
                _zeros(shape, kind, f"{name}{index}") for index in range(self._config.num_layers)
            )
            for name, (shape, kind) in shapes.items()
        )

    @property
    def adapters(self) -> list[tuple[PoolLayout, Parameter]]:
        """The pools of all targeted layers."""
        pairs = zip(self.layouts, self.pools, strict=True)
        return [(layout, pool) for layout, pool in pairs if layout is not None]

    @property
    def caches(self) -> list[Parameter]:
        """All cache parameters; their first axis is slot-major."""
        found = [*self.keys, *self.values]
        scales = [*self.key_scales, *self.value_scales]
        return found + (scales if scales[0].shape[1] > 1 else [])


class NativeStep(nn.Cell):
    """A step of up to `capacity` tokens, with logits after at most `wanted` of them."""

    def __init__(self, network: NativeNetwork, capacity: int, wanted: int) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.embed = _operator("Embedding", network.hidden, capacity)
        self.compute = _operator("Layers", network.hidden, capacity)
        self.predict = _operator(network.head, network.vocab, wanted)

    def construct(self, step: Tensor, rope: Tensor, adapter_slots: Tensor) -> Tensor:
        """`step`: see Step in native/src/layers.h; `rope` [rows, R * head_dim], cos and
        sin of R rotary positions;
        `adapter_slots` [capacity] per token, below 0 the base model -> logits [wanted, vocab]."""
        net = self.network
        last = len(net.layers) - 1
        x = self.embed(step, adapter_slots, net.layers[0], *self.pool(0))
        blocks: tuple[Tensor, ...] = ()
        for index in range(last // 2):
            attention, feed_forward = 2 * index + 1, 2 * index + 2
            blocks = (
                *blocks,
                net.layers[attention],
                net.keys[index],
                net.values[index],
                net.key_scales[index],
                net.value_scales[index],
                *self.pool(attention),
                net.layers[feed_forward],
                *self.pool(feed_forward),
            )
        x = self.compute(x, step, rope, adapter_slots, *blocks)
        return self.predict(
            x, step, adapter_slots, net.layers[last], net.layers[0], *self.pool(last)
        )

    def pool(self, layer: int) -> tuple[Tensor, ...]:
        """The extra input of a targeted layer."""
        return () if self.network.layouts[layer] is None else (self.network.pools[layer],)
