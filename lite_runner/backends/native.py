"""The native backend: our own CPU kernels (lite_runner.native).

One graph serves prefill and decode: a step takes tokens of any rows up to its capacity (continuous
batching). Logits are batch-invariant: bit-identical whatever else is in the batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.adapter_slots import LoraSlots
from lite_runner.backends.base import BASE, AdapterSlots, BackendInfo, Row
from lite_runner.backends.batch_metadata import BatchMetadata, TokenBatch, forward_in_steps
from lite_runner.backends.device import set_device
from lite_runner.backends.graph_cache import GraphCache
from lite_runner.backends.network_cache import break_cycles, copy_slots, release_memory
from lite_runner.backends.step_sizes import cache_length, rows_at_once, step_capacity
from lite_runner.native.packed_model import Weights
from lite_runner.networks.native import NativeNetwork, NativeStep
from lite_runner.networks.native import NativeOptions as NativeOptions
from lite_runner.weights.lora.adapter import Adapter


class NativeBackend:
    """See `lite_runner.backends.base.Backend`."""

    def __init__(
        self,
        config: Decoder,
        weights: Weights,
        options: NativeOptions,
        adapters: Sequence[Adapter] = (),
        *,
        threads: int | None = None,
    ) -> None:
        """`adapters`: the initial ones, if `options` have adapter slots; `threads` None: one per
        processor available to this process."""
        self._network: NativeNetwork | None = None
        self._steps: dict[int, NativeStep] = {}  # compiled graphs by their rows of logits
        set_device("CPU", 0, threads)
        native.set_threads(threads)
        self.compile_s = 0.0
        self._config = config
        options = replace(options, length=cache_length(options.length, config.seq_length))
        network = self._network = NativeNetwork(config, weights, options)
        self.adapters: AdapterSlots | None
        self.adapters = LoraSlots(network, adapters, options.lora) if options.lora else None
        self._configure(network, options)

    def _configure(self, network: NativeNetwork, options: NativeOptions) -> None:
        """Set everything that depends on the cache size."""
        break_cycles(network)
        self._options, config = options, self._config
        self._capacity = step_capacity(options.slots)
        self.info = BackendInfo(
            engine=f"mindspore, {native.instructions()} kernels",
            vocab_size=config.vocab_size,
            slots=options.slots,
            max_length=options.length,
            budget=self._capacity,
            chunk=1,
            most_logits=rows_at_once(config.vocab_size, self._capacity),
            can_continue=not config.length_dependent,
        )
        self._metadata = BatchMetadata(config, self.info.max_length, self._capacity)
        self._table = Tensor(self._metadata.table)
        self._graphs = GraphCache(
            {
                "operators": str(native.LIBRARY),  # MindSpore keeps the path in the graph
                "weights": [[*one.shape, str(one.dtype)] for one in network.get_parameters()],
                "sizes": [
                    asdict(replace(options, lora=None)),
                    config.hidden_size,
                    self._capacity,
                ],
                "adapters": [layout is not None for layout in network.layouts],
            }
        )

    def grow(self, slots: int, length: int) -> None:
        """Reallocate the cache; the weights and the adapters stay."""
        assert self._network is not None
        self._steps.clear()
        length = cache_length(length, self._config.seq_length)
        options = replace(self._options, slots=slots, length=length)
        self._network.resize(options)
        self._configure(self._network, options)
        release_memory()

    def prepare(self) -> None:
        """Compile the graph for steps with few logits."""
        self._compiled(self.info.slots)

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [sum of row.logits, vocab], in the order of rows and tokens."""
        most = max(self.info.slots, self.info.most_logits)
        return forward_in_steps(rows, self._capacity, most, self.info.vocab_size, self._run)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]; all are read before any is written."""
        assert self._network is not None
        copy_slots(self._network.caches, self.info.slots, sources, targets)

    def close(self) -> None:
        """Release the network and its memory."""
        if self._network is not None:
            self._steps.clear()
            self._network = self.adapters = None
            release_memory()

    # Bound as a default: at interpreter shutdown module globals may be cleared first.
    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()

    def _run(
        self, every: TokenBatch, part: slice, wanted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """One step over a part of the tokens -> logits after the `wanted` ones."""
        most = self._most(len(wanted))
        metadata, angles = self._metadata.of(every, part, wanted, most)
        table = Tensor(angles) if self._metadata.new_tables else self._table
        adapter_slots = self._adapter_slots(every.rows, every.owner[part])
        graph = self._compiled(most)
        logits: NDArray[np.float32] = graph(
            Tensor(metadata), table, Tensor(adapter_slots)
        ).asnumpy()
        return logits[: len(wanted)]

    def _most(self, wanted: int) -> int:
        """Rows of logits of the graph to use for a step: the smaller of two sizes that suffices,
        preferring a compiled one."""
        sizes = sorted({self.info.slots, self.info.most_logits})
        enough = [size for size in sizes if size >= wanted]
        return next((size for size in enough if size in self._steps), enough[0])

    def _adapter_slots(self, rows: Sequence[Row], owner: NDArray[np.int64]) -> NDArray[np.int32]:
        """Adapter slot per token [capacity]."""
        if self.adapters is None:
            return np.zeros(1, np.int32)
        found = np.full(self._capacity, BASE, np.int32)
        found[: len(owner)] = np.array([row.adapter_slot for row in rows])[owner]
        return found

    def _compiled(self, wanted: int) -> NativeStep:
        if wanted in self._steps:
            return self._steps[wanted]
        assert self._network is not None
        start = time.perf_counter()
        graph = NativeStep(self._network, self._capacity, wanted)
        graph.set_train(False)
        metadata = Tensor(self._metadata.empty(wanted))
        slots = Tensor(np.zeros(1 if self.adapters is None else self._capacity, np.int32))
        purpose = "generate" if wanted == self.info.slots else "score"
        self._graphs.compile(graph, metadata, self._table, slots, name="graph", purpose=purpose)
        self._steps[wanted] = graph
        self.compile_s += time.perf_counter() - start
        return graph
