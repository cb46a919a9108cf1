"""The native kernels as operators of MindSpore graphs: one graph serves prefill and decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.adapter_cells import CellPools
from lite_runner.backends.batch_metadata import empty_metadata
from lite_runner.backends.device import set_device
from lite_runner.backends.graph_cache import GraphCache
from lite_runner.backends.native import NativeBackend
from lite_runner.backends.native import NativeOptions as NativeOptions
from lite_runner.backends.network_cache import break_cycles, copy_slots, release_memory
from lite_runner.native.packed_model import Weights
from lite_runner.networks.native import NativeNetwork, NativeStep
from lite_runner.weights.lora.adapter import Adapter


def open_compiled(
    config: Decoder,
    weights: Weights,
    options: NativeOptions,
    adapters: Sequence[Adapter] = (),
    *,
    threads: int | None = None,
) -> NativeBackend:
    """A native backend that computes as MindSpore graphs: see NativeBackend."""
    set_device("CPU", 0, threads)
    executor = CompiledModel(config, weights, options)
    return NativeBackend(config, executor, options, adapters, threads=threads)


class CompiledModel:
    """See `lite_runner.backends.native.Executor`."""

    name = "mindspore"

    def __init__(self, config: Decoder, weights: Weights, options: NativeOptions) -> None:
        self._config = config
        self._network: NativeNetwork | None = NativeNetwork(config, weights, options)
        self.adapters = CellPools(self._network, options.lora)
        self.compile_s = 0.0
        self._steps: dict[int, NativeStep] = {}  # compiled graphs by their rows of logits

    def resize(self, options: NativeOptions, capacity: int, table: NDArray[np.float32]) -> None:
        """See Executor."""
        network, config = self._network, self._config
        assert network is not None
        self._steps.clear()
        network.resize(options)
        break_cycles(network)
        self._options, self._capacity, self._table = options, capacity, (table, Tensor(table))
        self._graphs = GraphCache(
            {
                "operators": str(native.LIBRARY),  # MindSpore keeps the path in the graph
                "weights": [[*one.shape, str(one.dtype)] for one in network.get_parameters()],
                "sizes": [asdict(replace(options, lora=None)), config.hidden_size, capacity],
                "adapters": [layout is not None for layout in network.layouts],
            }
        )
        release_memory()

    def prepare(self) -> None:
        """See Executor."""
        self._compiled(self._options.slots)

    def rows(self, wanted: int, most: int) -> int:
        """The smaller of two sizes that suffices, preferring a compiled one."""
        sizes = sorted({self._options.slots, most})
        enough = [size for size in sizes if size >= wanted]
        return next((size for size in enough if size in self._steps), enough[0])

    def run(
        self,
        metadata: NDArray[np.int32],
        table: NDArray[np.float32],
        adapter_slots: NDArray[np.int32] | None,
        rows: int,
    ) -> NDArray[np.float32]:
        """See Executor."""
        if self._table[0] is not table:
            self._table = table, Tensor(table)
        slots = np.zeros(1, np.int32) if adapter_slots is None else adapter_slots
        step = self._compiled(rows)
        logits: NDArray[np.float32] = step(
            Tensor(metadata), self._table[1], Tensor(slots)
        ).asnumpy()
        return logits

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Executor."""
        assert self._network is not None
        copy_slots(self._network.caches, self._options.slots, sources, targets)

    def close(self) -> None:
        """See Executor."""
        self._steps.clear()
        self._network = None
        release_memory()

    def _compiled(self, rows: int) -> NativeStep:
        """The graph of steps with `rows` rows of logits."""
        if rows in self._steps:
            return self._steps[rows]
        assert self._network is not None
        start = time.perf_counter()
        graph = NativeStep(self._network, self._capacity, rows)
        graph.set_train(False)
        metadata = Tensor(empty_metadata(self._capacity, rows, self._config.prefix))
        slots = Tensor(np.zeros(self._capacity if self._options.lora else 1, np.int32))
        purpose = "generate" if rows == self._options.slots else "score"
        self._graphs.compile(graph, metadata, self._table[1], slots, name="graph", purpose=purpose)
        self._steps[rows] = graph
        self.compile_s += time.perf_counter() - start
        return graph
