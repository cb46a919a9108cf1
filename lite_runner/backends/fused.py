"""The online backend on CPU, through our own operators (lite_runner.kernels).

One graph serves prompts and new tokens alike: a step takes the tokens of any rows, up to its
capacity. What a row's logits are depends on its own tokens only, to the last bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from lite_runner import kernels, progress
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.adapter_pool import AdapterPool, pool_size
from lite_runner.backends.base import Row
from lite_runner.backends.device import set_device
from lite_runner.backends.graph_cache import GraphCache
from lite_runner.backends.likelihood import log_likelihoods_of, rows_at_once
from lite_runner.backends.memory import give_back, untie
from lite_runner.backends.sizes import cache_length, step_capacity
from lite_runner.backends.slots import copy_slots
from lite_runner.backends.step_words import RowTokens, StepWords
from lite_runner.config.quantization import CacheType
from lite_runner.kernels.packed_model import Weights
from lite_runner.models.fused import FusedNetwork, FusedSizes, FusedStep, cached_positions
from lite_runner.signals import deferred
from lite_runner.weights.adapter import Adapter


@dataclass(frozen=True)
class FusedOptions:
    """What a fused backend is asked for."""

    slots: int  # rows that can be held at once
    length: int  # tokens that the longest row may reach, prompt and new ones
    threads: int | None = None  # None: as many as there are processors for this process
    cache: CacheType = "fp32"
    integer_input: bool = False  # a8w8: what is multiplied with int8 weights is rounded too
    loaded_adapters: int = 0  # of the adapters, how many are in memory at a time
    round_adapters: bool = False  # to bfloat16, those too that it does not hold without a loss
    widen: bool = False  # quant=none: the integers of a file become float32


class FusedBackend:
    """See `lite_runner.backends.base.Scorer`."""

    def __init__(
        self,
        config: Decoder,
        weights: Weights,
        options: FusedOptions,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """A row's adapter is one of `adapters`, counted from 1."""
        self._network: FusedNetwork | None = None
        self._steps: dict[int, FusedStep] = {}  # compiled, by the rows of logits they give
        set_device("CPU", 0, options.threads)
        kernels.set_threads(options.threads)
        self.engine = f"mindspore, {kernels.instructions()} kernels"
        self.vocab_size = config.vocab_size
        self.compile_s = 0.0
        self._config = config
        pool = None
        if adapters:
            places, rounded = options.loaded_adapters, options.round_adapters
            pool = pool_size(adapters, places, rounded=rounded)
        length = cached_positions(cache_length(options.length, config.seq_length))
        sizes = FusedSizes(
            options.slots, length, options.cache, options.integer_input, pool, options.widen
        )
        network = self._network = FusedNetwork(config, weights, sizes)
        self.adapters = AdapterPool(network, adapters, pool) if pool else None
        self._lay_out(network, sizes, options.length)

    def _lay_out(self, network: FusedNetwork, sizes: FusedSizes, wanted: int) -> None:
        """All that depends on the room which the network has, of rows of `wanted` tokens."""
        untie(network)
        self._sizes, self.slots = sizes, sizes.slots
        self.max_length = cache_length(wanted, self._config.seq_length)
        self._capacity = step_capacity(sizes.slots)
        self._words = StepWords(self._config, self.max_length, self._capacity)
        self._table = Tensor(self._words.table)
        self._graphs = GraphCache(
            {
                "operators": str(kernels.LIBRARY),  # MindSpore keeps the path in the graph
                "weights": [[*one.shape, str(one.dtype)] for one in network.get_parameters()],
                "sizes": [
                    asdict(replace(sizes, lora=None)),
                    self._config.hidden_size,
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
        """Compile the graph of all steps."""
        self._compiled(self.slots)

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [len(rows), vocab] after each row's last token."""
        self.prepare()
        began = time.perf_counter()
        logits = np.empty((len(rows), self.vocab_size), np.float32)
        every = RowTokens.of(rows)
        for part, here, ends in every.parts(self._capacity):
            logits[here] = self._run(every, part, ends, self.slots)
        if self.adapters is not None:
            self.adapters.spent(time.perf_counter() - began, [row.adapter for row in rows])
        return logits

    def logits(self, tokens: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """Logits after each of `tokens` [n], in parts [k, vocab]. Slot 0 is overwritten."""
        every = RowTokens.of([Row(0, tokens, 0)])
        wanted = rows_at_once(self.vocab_size, self._capacity)
        for start in range(0, len(tokens), wanted):
            part = slice(start, min(start + wanted, len(tokens)))
            yield self._run(every, part, np.arange(part.start, part.stop), wanted)

    def scores(self, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        """Log-likelihood of each of tokens[1:] given those before it [n - 1].

        Slot 0 is overwritten.
        """
        return log_likelihoods_of(self.logits(tokens[:-1]), tokens[1:])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slot targets[i] becomes slot sources[i]; all are read before any is written."""
        assert self._network is not None
        copy_slots(self._network.caches, self.slots, sources, targets)

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

    def _run(
        self, every: RowTokens, part: slice, wanted: NDArray[np.int64], most: int
    ) -> NDArray[np.float32]:
        """One step over a part of the tokens -> logits after those that are `wanted`, of which
        there are `most` at most."""
        words, angles = self._words.of(every, part, wanted, most)
        table = Tensor(angles) if self._words.new_tables else self._table
        places = self._places(every.rows, every.owner[part])
        graph = self._compiled(most)
        logits: NDArray[np.float32] = graph(Tensor(words), table, Tensor(places)).asnumpy()
        return logits[: len(wanted)]

    def _places(self, rows: Sequence[Row], owner: NDArray[np.int64]) -> NDArray[np.int32]:
        """Where the adapter of each token is [capacity]; -1: the base."""
        if self.adapters is None:
            return np.zeros(1, np.int32)
        found = np.full(self._capacity, -1, np.int32)
        here = np.unique(owner)
        places = np.full(len(rows), -1, np.int32)
        places[here] = self.adapters.places_of([rows[index].adapter for index in here])
        found[: len(owner)] = places[owner]
        found[found == self.adapters.places] = -1
        return found

    def _compiled(self, wanted: int) -> FusedStep:
        if wanted in self._steps:
            return self._steps[wanted]
        assert self._network is not None
        start = time.perf_counter()
        graph = FusedStep(self._network, self._capacity, wanted)
        graph.set_train(False)
        words = Tensor(self._words.empty(wanted))
        with self._graphs.entry("generate" if wanted == self.slots else "score") as cached:
            shown = nullcontext() if cached else progress.step("compile the graph")
            with shown, deferred():  # interrupted, MindSpore leaves a dump and goes on
                places = np.zeros(1 if self.adapters is None else self._capacity, np.int32)
                graph.compile(words, self._table, Tensor(places))
        self._steps[wanted] = graph
        self.compile_s += time.perf_counter() - start
        return graph
