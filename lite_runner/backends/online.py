"""The online backend: a MindSpore network built from a checkpoint, on CPU or Ascend.

Two graphs share the weights and the cache: *prefill* takes one row of any length (a dynamic
shape), *decode* one token of every slot (a static shape, which runs a quarter faster). A row is
prefilled alone, so what stands beside it cannot change its logits. A third, *score*, is a prefill
that gives the logits after every token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from lite_runner import environment, progress
from lite_runner.architectures import network_code
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.adapter_pool import AdapterPool, pool_size
from lite_runner.backends.base import Row
from lite_runner.backends.collectives import tensor_parallel
from lite_runner.backends.device import choose_attention, set_device
from lite_runner.backends.graph_cache import GraphCache
from lite_runner.backends.likelihood import log_likelihoods_of, rows_at_once
from lite_runner.backends.memory import give_back, untie
from lite_runner.backends.sizes import cache_length, chunk_length
from lite_runner.backends.slots import copy_slots
from lite_runner.config.ranks import Ranks
from lite_runner.models.layers import BuildOptions, CacheSize, Weights, resize
from lite_runner.models.networks import Decode, LoraDecode, LoraPrefill, Prefill, Score, network_of
from lite_runner.models.quantized import LinearIntegers
from lite_runner.signals import deferred
from lite_runner.weights.adapter import Adapter
from lite_runner.weights.read_ahead import QuantizedWeights


@dataclass(frozen=True)
class OnlineOptions:
    """What an online backend is asked for."""

    slots: int  # rows that can be held at once
    length: int  # tokens that the longest row may reach, prompt and new ones
    dtype: str = "float32"
    device: str = "CPU"
    device_id: int = 0
    threads: int | None = None  # None: MindSpore's own choice
    use_past: bool = True  # False: no cache, every step computes the whole row anew
    ranks: Ranks = Ranks()  # noqa: RUF009  (frozen)
    vocab_parallel: bool = True  # several ranks: the embedding and the head are cut too
    loaded_adapters: int = 0  # of the adapters, how many are on the device at a time
    integer_input: bool = False  # a8w8, where the weights are integers
    pynative: bool = False  # operators one by one: nothing is compiled, and each step is slower


class OnlineBackend:
    """See `lite_runner.backends.base.Scorer`.

    Of several ranks each has a backend of its own; those that share a copy of the model get the
    same rows in the same order, and compute the same logits.
    """

    engine = "mindspore"

    def __init__(
        self,
        config: Decoder,
        weights: Weights | QuantizedWeights,
        options: OnlineOptions,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`config` is the whole model's, `weights` give this rank's pieces, as do `adapters`:
        a row's adapter is one of these, counted from 1. QuantizedWeights are for Ascend, whose
        operators multiply by integers.

        Several ranks must have met before: see `lite_runner.backends.collectives`.
        """
        self._network: nn.Cell | None = None
        self._compiled: dict[str, nn.Cell] = {}
        self._history: dict[int, NDArray[np.int32]] = {}  # use_past=False: tokens of each slot
        set_device(options.device, options.device_id, options.threads, pynative=options.pynative)
        fused = environment.has_fused_operators(options.device)
        if fused:
            choose_attention()
        self.vocab_size = config.vocab_size
        self.compile_s = 0.0  # so far; a part of the forward that it happened in
        length = cache_length(options.length, config.seq_length)
        size = CacheSize(options.slots, length) if options.use_past else None
        parallel = tensor_parallel(options.ranks, cut_vocabulary=options.vocab_parallel)
        pool = pool_size(adapters, options.loaded_adapters) if adapters else None
        build = BuildOptions(
            size,
            getattr(ms, options.dtype),
            parallel,
            pool,
            fused,
            options.integer_input,
        )
        local = config.shard(options.ranks.tensor)
        if isinstance(weights, QuantizedWeights):
            weights = LinearIntegers(weights, config)
        network = self._network = network_of(local, weights, build)
        self.adapters = AdapterPool(network, adapters, pool) if pool else None
        self._config, self._pool, self._heads = config, pool, local.num_heads
        self._fused = fused
        self._use_past = options.use_past
        self._pynative = options.pynative
        self._ranks = options.ranks
        self._lay_out(network, replace(options, length=length))

    def _lay_out(self, network: nn.Cell, options: OnlineOptions) -> None:
        """All that depends on the room which the network has."""
        untie(network)
        self._options, self.slots, self.max_length = options, options.slots, options.length
        pool = self._pool
        self._graphs = GraphCache(
            {
                "model": asdict(self._config),
                "options": asdict(options) | {"threads": None},
                "fused": self._fused,
                "adapters": pool and [pool.places, pool.rank, sorted(pool.targets)],
                # Integers, by column or by group, are multiplied by other operators than floats.
                "weights": [
                    [one.name, list(one.shape), str(one.dtype)] for one in network.get_parameters()
                ],
                "network": network_code(self._config),
            }
        )
        self._chunk = chunk_length(self._heads, self.max_length)

    def grow(self, slots: int, length: int) -> None:
        """Room for other rows, and as long ones; the weights and the adapters stay."""
        assert self._network is not None
        self._compiled.clear()
        options = replace(
            self._options, slots=slots, length=cache_length(length, self._config.seq_length)
        )
        if self._use_past:
            resize(self._network, CacheSize(options.slots, options.length))
        self._lay_out(self._network, options)
        give_back()

    def prepare(self) -> None:
        """Compile what the first token needs; `forward` does it where this was not called.

        Always prefill first, as the graph cache wants it. Decode can wait for the first token
        where it is read from the cache; compiling it would interrupt the text for seconds. Of
        several ranks one may have it in its cache and keep the others waiting.
        """
        cached = self._compile("prefill")
        if self._use_past and (not cached or self._ranks.size > 1):
            self._compile("decode")

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [len(rows), vocab] after each row's last token."""
        logits = np.empty((len(rows), self.vocab_size), np.float32)
        decoded = []
        for index, row in enumerate(rows):
            if self._use_past and row.position > 0 and len(row.tokens) == 1:
                decoded.append(index)
            else:
                with self._timed([row]):
                    logits[index] = self._prefill(row)
        if decoded:
            together = [rows[index] for index in decoded]
            with self._timed(together):
                logits[decoded] = self._decode(together)
        return logits

    def logits(self, tokens: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """Logits of the base model after each of `tokens` [n], in parts [k, vocab].

        Slot 0 is overwritten. Every rank computes the same.
        """
        return self._logits(tokens, len(tokens))

    def scores(self, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        """Log-likelihood of each of tokens[1:] given those before it, by the base model [n - 1].

        Slot 0 is overwritten. Every rank computes the same.
        """
        return log_likelihoods_of(self._logits(tokens[:-1], len(tokens)), tokens[1:])

    def _logits(self, tokens: NDArray[np.int32], length: int) -> Iterator[NDArray[np.float32]]:
        """Those of the first tokens of a text of so many, for which dynamic positions are."""
        step = rows_at_once(self.vocab_size, self._chunk) if self._use_past else len(tokens)
        for start in range(0, len(tokens), step):
            yield self._run("score", tokens[None, start : start + step], [start], [length], [0])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slot targets[i] becomes slot sources[i]; all are read before any is written."""
        if not self._use_past:
            self._history |= {
                target: self._history[source]
                for source, target in zip(sources, targets, strict=True)
            }
            return
        assert self._network is not None
        layers = [block.attention for block in self._network.blocks]
        caches = [cache for layer in layers for cache in (layer.keys, layer.values)]
        copy_slots(caches, self.slots, sources, targets)

    def close(self) -> None:
        """Let go of the network, and of its memory."""
        if self._network is not None:
            self._compiled.clear()
            self._history.clear()
            self._network = self.adapters = None
            give_back()

    # A default, since modules are emptied before the last objects are.
    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()

    @contextmanager
    def _timed(self, rows: Sequence[Row]) -> Iterator[None]:
        """Count the time of a step, without compiling, for the adapters of its rows."""
        began, compiled = time.perf_counter(), self.compile_s
        yield
        if self.adapters is not None:
            seconds = time.perf_counter() - began - (self.compile_s - compiled)
            self.adapters.spent(seconds, [row.adapter for row in rows])

    def _prefill(self, row: Row) -> NDArray[np.float32]:
        tokens, position = row.tokens, row.position
        if not self._use_past:
            tokens = np.concatenate([self._history.get(row.slot, tokens[:0])[:position], tokens])
            self._history[row.slot] = tokens
            position = 0
        length = position + len(tokens)
        step = self._chunk if self._use_past else len(tokens)
        logits: NDArray[np.float32]
        for start in range(0, len(tokens), step):
            piece = tokens[None, start : start + step]
            inputs = [piece, [position + start], [length], [row.slot]]
            if self.adapters is not None:
                inputs.append(self.adapters.places_of([row.adapter]))
            logits = self._run("prefill", *inputs)[0]
        return logits

    def _decode(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        slots = [row.slot for row in rows]
        tokens = np.zeros((self.slots, 1), np.int32)
        position = np.full(self.slots, self.max_length - 1, np.int32)  # the scratch place
        tokens[slots, 0] = [row.tokens[0] for row in rows]
        position[slots] = [row.position for row in rows]
        inputs = [tokens, position, position + 1]
        if self.adapters is not None:
            place = np.full(self.slots, self.adapters.places, np.int32)
            place[slots] = self.adapters.places_of([row.adapter for row in rows])
            inputs.append(place)
        logits = self._run("decode", *inputs)
        return logits if slots == list(range(self.slots)) else logits[slots]

    def _run(self, kind: str, *arrays: object) -> NDArray[np.float32]:
        if not self._compiled and kind != "score":
            self.prepare()
        if kind not in self._compiled:
            self._compile(kind)
        inputs = [Tensor(np.asarray(array, np.int32)) for array in arrays]
        logits: NDArray[np.float32] = self._compiled[kind](*inputs).asnumpy()
        return logits

    def _compile(self, kind: str) -> bool:
        """Compile a graph, or read it from the cache, which the answer tells."""
        start = time.perf_counter()
        one = Tensor(np.zeros(1, np.int32))
        graph: nn.Cell
        if kind != "decode":
            by_base = self.adapters is None or kind == "score"
            ones = [one] * (3 if by_base else 4)
            prefill = Prefill if by_base else LoraPrefill
            graph = (Score if kind == "score" else prefill)(self._network)
            graph.set_inputs(Tensor(shape=[1, None], dtype=ms.int32), *ones)
            inputs = [Tensor(np.zeros((1, 2), np.int32)), *ones]
        else:
            graph = (Decode if self.adapters is None else LoraDecode)(self._network)
            each = Tensor(np.zeros(self.slots, np.int32))
            each_row = [each] * (2 if self.adapters is None else 3)
            inputs = [Tensor(np.zeros((self.slots, 1), np.int32)), *each_row]
        graph.set_train(False)
        if self._pynative:
            self._compiled[kind] = graph
            return True
        purpose = "score" if kind == "score" else "generate"
        with self._graphs.entry(purpose) as cached:
            shown = nullcontext() if cached else progress.step(f"compile the {kind} graph")
            with shown, deferred():  # interrupted, MindSpore leaves a dump and goes on
                graph.compile(*inputs)
        self._compiled[kind] = graph
        self.compile_s += time.perf_counter() - start
        return cached
