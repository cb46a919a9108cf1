"""The online backend on CPU, through our own operators (lite_runner.native).

One graph serves prompts and new tokens alike: a step takes the tokens of any rows, up to its
capacity. What a row's logits are depends on its own tokens only, to the last bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from lite_runner import native, progress
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.adapter_slots import LoraSlots
from lite_runner.backends.base import BASE, AdapterSlots, BackendInfo, Row
from lite_runner.backends.batch_metadata import BatchMetadata, RowTokens
from lite_runner.backends.cache_memory import give_back, untie
from lite_runner.backends.cache_slots import copy_slots
from lite_runner.backends.device import set_device
from lite_runner.backends.graph_cache import GraphCache
from lite_runner.backends.likelihood import rows_at_once
from lite_runner.backends.step_sizes import cache_length, step_capacity
from lite_runner.config.quantization import CacheType
from lite_runner.native.lora_pool import LoraSize
from lite_runner.native.packed_model import Weights
from lite_runner.networks.native import NativeNetwork, NativeSizes, NativeStep, cached_positions
from lite_runner.system.signals import deferred
from lite_runner.weights.lora.adapter import Adapter


@dataclass(frozen=True)
class NativeOptions:
    """What a fused backend is asked for."""

    slots: int  # rows that can be held at once
    length: int  # tokens that the longest row may reach, prompt and new ones
    threads: int | None = None  # None: as many as there are processors for this process
    cache: CacheType = "fp32"
    integer_input: bool = False  # a8w8: what is multiplied with int8 weights is rounded too
    lora: LoraSize | None = None  # room for adapters; None: the base model alone
    dequantize: bool = False  # quant=none: the integers of a file become float32


class NativeBackend:
    """See `lite_runner.backends.base.Backend`."""

    def __init__(
        self,
        config: Decoder,
        weights: Weights,
        options: NativeOptions,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`adapters` are those that are known from the start, where `options` have room."""
        self._network: NativeNetwork | None = None
        self._steps: dict[int, NativeStep] = {}  # compiled, by the rows of logits they give
        set_device("CPU", 0, options.threads)
        native.set_threads(options.threads)
        self.compile_s = 0.0
        self._config = config
        length = cached_positions(cache_length(options.length, config.seq_length))
        lora, dequantize = options.lora, options.dequantize
        sizes = NativeSizes(
            options.slots, length, options.cache, options.integer_input, lora, dequantize
        )
        network = self._network = NativeNetwork(config, weights, sizes)
        self.adapters: AdapterSlots | None
        self.adapters = LoraSlots(network, adapters, lora) if lora else None
        self._lay_out(network, sizes, options.length)

    def _lay_out(self, network: NativeNetwork, sizes: NativeSizes, wanted: int) -> None:
        """All that depends on the room which the network has, of rows of `wanted` tokens."""
        untie(network)
        self._sizes, config = sizes, self._config
        self._capacity = step_capacity(sizes.slots)
        self.info = BackendInfo(
            engine=f"mindspore, {native.instructions()} kernels",
            vocab_size=config.vocab_size,
            slots=sizes.slots,
            max_length=cache_length(wanted, config.seq_length),
            budget=self._capacity,
            chunk=1,
            most_logits=rows_at_once(config.vocab_size, self._capacity),
            can_continue=not config.length_dependent,
        )
        self._words = BatchMetadata(config, self.info.max_length, self._capacity)
        self._table = Tensor(self._words.table)
        self._graphs = GraphCache(
            {
                "operators": str(native.LIBRARY),  # MindSpore keeps the path in the graph
                "weights": [[*one.shape, str(one.dtype)] for one in network.get_parameters()],
                "sizes": [
                    asdict(replace(sizes, lora=None)),
                    config.hidden_size,
                    self._capacity,
                ],
                "adapters": [layout is not None for layout in network.layouts],
            }
        )

    def grow(self, slots: int, length: int) -> None:
        """Room for other rows, and as long ones; the weights and the adapters stay."""
        assert self._network is not None
        self._steps.clear()
        positions = cached_positions(cache_length(length, self._config.seq_length))
        sizes = replace(self._sizes, slots=slots, length=positions)
        self._network.resize(sizes)
        self._lay_out(self._network, sizes, length)
        give_back()

    def prepare(self) -> None:
        """Compile the graph of all steps that give few logits."""
        self._compiled(self.info.slots)

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [sum of row.logits, vocab], in the order of the rows and of their tokens."""
        every = RowTokens.of(rows)
        logits = np.empty((len(every.wanted), self.info.vocab_size), np.float32)
        most = max(self.info.slots, self.info.most_logits)
        for part, here in every.parts(self._capacity, most):
            logits[here] = self._run(every, part, every.wanted[here])
        return logits

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slot targets[i] becomes slot sources[i]; all are read before any is written."""
        assert self._network is not None
        copy_slots(self._network.caches, self.info.slots, sources, targets)

    def close(self) -> None:
        """Let go of the network, and of its memory."""
        if self._network is not None:
            self._steps.clear()
            self._network = self.adapters = None
            give_back()

    # A default, since modules are emptied before the last objects are.
    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()

    def _run(self, every: RowTokens, part: slice, wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        """One step over a part of the tokens -> logits after those that are `wanted`."""
        most = self._most(len(wanted))
        words, angles = self._words.of(every, part, wanted, most)
        table = Tensor(angles) if self._words.new_tables else self._table
        adapter_slots = self._adapter_slots(every.rows, every.owner[part])
        graph = self._compiled(most)
        logits: NDArray[np.float32] = graph(Tensor(words), table, Tensor(adapter_slots)).asnumpy()
        return logits[: len(wanted)]

    def _most(self, wanted: int) -> int:
        """Rows of logits that the graph for a step gives which wants so many: the smaller of the
        two, but for one that would have to be compiled where the larger has been."""
        sizes = sorted({self.info.slots, self.info.most_logits})
        enough = [size for size in sizes if size >= wanted]
        return next((size for size in enough if size in self._steps), enough[0])

    def _adapter_slots(self, rows: Sequence[Row], owner: NDArray[np.int64]) -> NDArray[np.int32]:
        """The adapter slot of each token [capacity]."""
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
        words = Tensor(self._words.empty(wanted))
        with self._graphs.entry("generate" if wanted == self.info.slots else "score") as cached:
            shown = nullcontext() if cached else progress.step("compile the graph")
            with shown, deferred():  # interrupted, MindSpore leaves a dump and goes on
                slots = np.zeros(1 if self.adapters is None else self._capacity, np.int32)
                graph.compile(words, self._table, Tensor(slots))
        self._steps[wanted] = graph
        self.compile_s += time.perf_counter() - start
        return graph
