"""Adapter slots in the cells of a MindSpore network."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from lite_runner.native.lora_pool import LoraSize
from lite_runner.networks.lora import EmbeddingLora, Lora
from lite_runner.networks.native import NativeNetwork
from lite_runner.weights.lora.adapter import Adapter


class CellPools:
    """See `lite_runner.backends.adapter_slots.AdapterPools`."""

    def __init__(self, network: nn.Cell, size: LoraSize | None) -> None:
        cells = [cell for _, cell in network.cells_and_names()]
        self._layers = [cell for cell in cells if isinstance(cell, Lora) and cell.names]
        self._tables = [cell for cell in cells if isinstance(cell, EmbeddingLora) and cell.names]
        self._pools = [
            pool for cell in cells if isinstance(cell, NativeNetwork) for pool in cell.adapters
        ]
        self.names = {name for cell in self._layers for name in cell.names}
        self.names |= {name for table in self._tables for name in table.names}
        self.names |= {name for layout, _ in self._pools for name in layout.names}
        # Other cells store adapters in their compute type.
        self.holds_bfloat16 = bool(self._pools)
        self._size = size
        held = [pool for _, pool in self._pools]
        for cell in self._layers:
            held += [cell.a, *cell.b]
        for table in self._tables:
            held += [table.a, table.b]
        self.nbytes = sum(one.nbytes for one in held)

    def load(self, adapter: Adapter, slot: int) -> None:
        """Write an adapter to a slot."""
        for layout, pool in self._pools:
            _write(pool, np.array([slot]), layout.row(adapter)[None])
        assert self._size is not None
        rank, slots = self._size.rank, self._size.slots
        span = np.arange(rank)
        for cell in self._layers:
            parts = [
                adapter.padded(name, rank, cell.a.shape[1], b.shape[1])
                for name, b in zip(cell.names, cell.b, strict=True)
            ]
            starts = (np.arange(len(parts)) * slots + slot) * rank
            rows = (starts[:, None] + span).reshape(-1)
            _write(cell.a, rows, np.concatenate([lora_a for lora_a, _ in parts]))
            for (_, lora_b), b in zip(parts, cell.b, strict=True):
                _write(b, slot * rank + span, lora_b.T)
        for table in self._tables:
            tokens = table.vocabulary
            lora_a, lora_b = adapter.padded(table.names[0], rank, tokens, table.b.shape[1])
            _write(table.a, slot * tokens + np.arange(tokens), lora_a.T)
            _write(table.b, slot * rank + span, lora_b.T)


def _write(target: Parameter, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
    update, new = ops.ScatterUpdate(), Tensor(np.ascontiguousarray(values))
    update(target, Tensor(rows.astype(np.int32)), new.astype(target.dtype))
