"""Multi-LoRA: a pool of adapters on the device, a different one per row.

P adapters are loaded at a time, one per adapter slot, their ranks zero-padded to R; the scale is
folded into B. A decode step multiplies every row by the A of all slots, masks the columns of other
slots (a mask computed once per step) and multiplies by the B of all slots: two products and no
gather, whatever the rows. A prefill, of one row, gathers its adapter from the pool.

For a row of the base model the delta is exactly zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from lite_runner.weights.lora.adapter import LoraSize

SIDE_BY_SIDE = 3  # maximum number of layers that share an input: q, k and v

# (adapter slots of the rows, masks for 1, 2 and 3 layers, blocks of A for 1, 2 and 3 layers or
# None)
LoraStep: TypeAlias = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...] | None]


def zeros(shape: tuple[int, int], name: str, dtype: ms.Type) -> Parameter:
    return Parameter(Tensor(np.zeros(shape, np.float32)).astype(dtype), name, requires_grad=False)


class LoraInputs(nn.Cell):
    """Adapter masks and indices of a step, computed once for all layers."""

    def __init__(self, size: LoraSize) -> None:
        super().__init__()
        own = np.eye(1 + size.slots, size.slots, -1, dtype=np.float32)  # row 0: the base model
        some = own.any(axis=1, keepdims=True).astype(np.float32)
        counts = range(1, SIDE_BY_SIDE + 1)
        decode = np.repeat(own, size.rank, axis=1)
        prefill = np.repeat(some, size.rank, axis=1)
        self.decode_masks = tuple(Tensor(np.tile(decode, (1, count))) for count in counts)
        self.prefill_masks = tuple(Tensor(np.tile(prefill, (1, count))) for count in counts)
        blocks = [np.arange(count, dtype=np.int32) * size.slots for count in counts]
        self.blocks = tuple(Tensor(block) for block in blocks)
        self.gather = ops.Gather()

    def construct(self, adapter_slot: Tensor, slot: Tensor | None) -> LoraStep:
        """Adapter slots of the rows [R], below 0 the base model; with a cache `slot` (a prefill) of
        one row, whatever its number of tokens."""
        if slot is None:
            return adapter_slot, self.chosen(self.decode_masks, adapter_slot), None
        first = ops.maximum(adapter_slot, 0)
        blocks: tuple[Tensor, ...] = ()
        for block in self.blocks:
            blocks = (*blocks, block + first)
        return adapter_slot, self.chosen(self.prefill_masks, adapter_slot), blocks

    def chosen(self, masks: tuple[Tensor, ...], adapter_slots: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = ()
        for mask in masks:
            found = (*found, self.gather(mask, adapter_slots + 1, 0))
        return found


class NoLora(nn.Cell):
    """In place of Lora if no layer is targeted. MindSpore parses the code of every cell again, so
    this is short."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.nothing = (None,) * layers

    def construct(self, x: Tensor, step: LoraStep | None) -> tuple[Tensor | None, ...]:
        return self.nothing


class Lora(nn.Cell):
    """LoRA deltas [n, out] of linear layers that share an input [n, in]."""

    def __init__(
        self, size: LoraSize, layers: Mapping[str, tuple[int, int]], dtype: ms.Type
    ) -> None:
        """`layers`: canonical name -> [in, out] on this rank, one of them targeted at least; the
        delta of an untargeted one is None."""
        super().__init__()
        self.names = [name for name in layers if name in size.targets]
        self.nothing = (None,) * len(layers)
        self.count, self.dtype = len(self.names), dtype
        self.slots, self.rank = size.slots, size.rank
        self.order = tuple(self.names.index(n) if n in self.names else -1 for n in layers)
        width = layers[self.names[0]][0]
        self.widths = [layers[name][1] for name in self.names]
        self.a = zeros((self.count * self.slots * self.rank, width), "a", dtype)
        self.b = ParameterTuple(
            zeros((self.slots * self.rank, out), f"b{index}", dtype)
            for index, out in enumerate(self.widths)
        )
        self.matmul_a, self.matmul_b = ops.MatMul(transpose_b=True), ops.MatMul()
        self.split = ops.Split(1, self.count)  # slicing takes twice as long
        self.gather = ops.Gather()

    def construct(self, x: Tensor, step: LoraStep | None) -> tuple[Tensor | None, ...]:
        if step is None:
            return self.nothing
        _, masks, blocks = step
        a = self.a
        if blocks is not None:
            height, width = self.count * self.slots, self.a.shape[1]
            a = self.gather(a.reshape(height, -1), blocks[self.count - 1], 0).reshape(-1, width)
        h = self.matmul_a(x.astype(self.dtype), a).astype(ms.float32) * masks[self.count - 1]
        parts = self.split(h) if self.count > 1 else (h,)
        added: tuple[Tensor | None, ...] = ()
        for index in self.order:
            if index < 0:
                added = (*added, None)
            else:
                b = self.b[index]
                if blocks is not None:
                    b = self.gather(b.reshape(self.slots, -1), blocks[0], 0)
                    b = b.reshape(self.rank, -1)
                added = (
                    *added,
                    self.matmul_b(parts[index].astype(self.dtype), b).astype(ms.float32),
                )
        return added


def lora_of(
    size: LoraSize | None, layers: Mapping[str, tuple[int, int]], dtype: ms.Type
) -> Lora | NoLora:
    """The deltas of layers that share an input; see Lora."""
    if size is None or size.targets.isdisjoint(layers):
        return NoLora(len(layers))
    return Lora(size, layers, dtype)


class EmbeddingLora(nn.Cell):
    """LoRA deltas of an embedding: [n, hidden] for tokens [n].

    A is a table with a row [R] per token and adapter slot.
    """

    def __init__(
        self, size: LoraSize | None, name: str, shape: tuple[int, int], dtype: ms.Type
    ) -> None:
        """`shape`: vocabulary and hidden size of the unsharded embedding."""
        super().__init__()
        self.names = [name] if size is not None and name in size.targets else []
        self.dtype = dtype
        if size is None or not self.names:
            return
        self.slots, self.rank, self.vocabulary = size.slots, size.rank, shape[0]
        self.a = zeros((size.slots * shape[0], size.rank), "a", dtype)
        self.b = zeros((size.slots * size.rank, shape[1]), "b", dtype)
        spread = np.tile(np.eye(size.rank, dtype=np.float32), (1, size.slots))
        self.spread = Tensor(spread).astype(dtype)
        self.gather, self.matmul = ops.Gather(), ops.MatMul()

    def construct(self, x: Tensor, tokens: Tensor, step: LoraStep | None) -> Tensor:
        """x [n, hidden]: the base embedding."""
        if step is None or not self.names:
            return x
        adapter_slots, masks, blocks = step
        first = ops.maximum(adapter_slots, 0) * self.vocabulary
        h = self.gather(self.a, first + tokens.reshape(-1), 0)
        b = self.b
        if blocks is None:
            h = self.matmul(h, self.spread)
        else:
            b = self.gather(b.reshape(self.slots, -1), blocks[0], 0).reshape(self.rank, -1)
        h = (h.astype(ms.float32) * masks[0]).astype(self.dtype)
        return x + self.matmul(h, b).astype(ms.float32)


class Adapters(nn.Cell):
    """A network's LoRA cells outside its blocks: step inputs, embedding and head."""

    def __init__(
        self,
        size: LoraSize | None,
        table: str,
        shape: tuple[int, int],
        head_rows: int,
        dtype: ms.Type,
    ) -> None:
        """`table`: canonical name of the embedding, of `shape` [vocab, hidden]; `head_rows`: logits
        that this rank computes."""
        super().__init__()
        self.inputs = None if size is None else LoraInputs(size)
        self.embedding = EmbeddingLora(size, table, shape, dtype)
        self.head = lora_of(size, {"lm_head.weight": (shape[1], head_rows)}, dtype)

    def construct(self, adapter_slot: Tensor | None, slot: Tensor | None) -> LoraStep | None:
        if adapter_slot is None or self.inputs is None:
            return None
        step: LoraStep = self.inputs(adapter_slot, slot)
        return step
