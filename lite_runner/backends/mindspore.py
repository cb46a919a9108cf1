"""The MindSpore backend: a network built from a checkpoint, on CPU or Ascend.

Two graphs share the weights and the cache: *prefill* takes one row of any length (a dynamic
shape), *decode* one token of every slot (a static shape, which runs a quarter faster). Each row is
prefilled alone, so other rows cannot change its logits. A third, *score*, is a prefill with logits
after every token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.adapter_cells import CellPools
from lite_runner.backends.adapter_slots import LoraSlots
from lite_runner.backends.base import BASE, AdapterSlots, BackendInfo, Row
from lite_runner.backends.graph_cache import GraphCache
from lite_runner.backends.mindspore_network import MindSporeOptions as MindSporeOptions
from lite_runner.backends.mindspore_network import build_network, graph_key
from lite_runner.backends.network_cache import break_cycles, copy_slots, release_memory
from lite_runner.backends.step_sizes import (
    cache_length,
    chunk_length,
    rows_at_once,
    step_budget,
    unchunked,
)
from lite_runner.networks import steps
from lite_runner.networks.layers import CacheSize, Weights, resize
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.read_ahead import QuantizedWeights

# Graphs without and with adapters.
_CELLS: dict[str, tuple[type[nn.Cell], type[nn.Cell]]] = {
    "prefill": (steps.Prefill, steps.LoraPrefill),
    "decode": (steps.Decode, steps.LoraDecode),
    "score": (steps.Score, steps.LoraScore),
}


class MindSporeBackend:
    """See `lite_runner.backends.base.Backend`.

    Every rank has its own backend; the ranks of a replica get the same rows in the same order, and
    compute the same logits.
    """

    def __init__(
        self,
        config: Decoder,
        weights: Weights | QuantizedWeights,
        options: MindSporeOptions,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`config` is the unsharded model; `weights` and the initial `adapters` are this rank's
        shards: see build_network."""
        self._network: nn.Cell | None = None
        self._compiled: dict[str, nn.Cell] = {}
        self._history: dict[int, NDArray[np.int32]] = {}  # use_past=False: tokens of each slot
        self.compile_s = 0.0  # so far; included in the time of the forward that compiled
        options = replace(options, length=cache_length(options.length, config.seq_length))
        network = self._network = build_network(config, weights, options)
        self.adapters: AdapterSlots | None
        self.adapters = (
            LoraSlots(CellPools(network, options.lora), adapters, options.lora)
            if options.lora
            else None
        )
        self._config = config
        self._use_past = options.use_past
        self._configure(network, options)

    def _configure(self, network: nn.Cell, options: MindSporeOptions) -> None:
        """Set everything that depends on the cache size."""
        break_cycles(network)
        self._options, config = options, self._config
        chunk = most = options.length
        if self._use_past:
            heads = config.shard(options.ranks.tensor).num_heads
            chunk = chunk_length(heads, options.length, unchunked(config, options.length))
            most = rows_at_once(config.vocab_size, chunk)
        self.info = BackendInfo(
            engine="mindspore",
            vocab_size=config.vocab_size,
            slots=options.slots,
            max_length=options.length,
            budget=step_budget(options.slots, chunk),
            chunk=chunk,
            most_logits=most,
            can_continue=config.keys_reusable,
            short_length=config.short_length,
            prefix=config.prefix,
        )
        self._graphs = GraphCache(graph_key(network, config, options))

    def grow(self, slots: int, length: int) -> None:
        """Reallocate the cache; the weights and the adapters stay."""
        assert self._network is not None
        self._compiled.clear()
        options = replace(
            self._options, slots=slots, length=cache_length(length, self._config.seq_length)
        )
        if self._use_past:
            resize(self._network, CacheSize(options.slots, options.length))
        self._configure(self._network, options)
        release_memory()

    def prepare(self) -> None:
        """Compile what the first token needs; else `forward` does it.

        Always prefill first, as the graph cache requires. On a cache hit decode is loaded lazily;
        compiling it later would interrupt the output for seconds. With several ranks it is always
        compiled here, since only some may have it cached.
        """
        if "prefill" in self._compiled:
            return
        cached = self._compile("prefill")
        if self._use_past and (not cached or self._options.ranks.size > 1):
            self._compile("decode")

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [sum of row.logits, vocab], in the order of rows and tokens; the same on every
        rank.
        """
        ends = np.cumsum([row.logits for row in rows])
        logits = np.empty((ends[-1], self.info.vocab_size), np.float32)
        decoded = []
        for index, row in enumerate(rows):
            one = self._use_past and row.position > 0 and len(row.tokens) == 1
            if one and not row.length:  # not a prompt chunk
                decoded.append(index)
            else:
                self._prefill(row, logits[ends[index] - row.logits : ends[index]])
        if decoded:
            found = self._decode([rows[index] for index in decoded])
            wanted = [at for at, index in enumerate(decoded) if rows[index].logits]
            logits[ends[decoded][wanted] - 1] = found[wanted]
        return logits

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]; all are read before any is written."""
        if not self._use_past:
            self._history |= {
                target: self._history[source]
                for source, target in zip(sources, targets, strict=True)
            }
            return
        assert self._network is not None
        layers = [block.attention for block in self._network.blocks]
        caches = [cache for layer in layers for cache in (layer.keys, layer.values)]
        if self._config.prefix is not None:
            caches.append(self._network.prefix.state)
        copy_slots(caches, self.info.slots, sources, targets)

    def close(self) -> None:
        """Release the network and its memory."""
        if self._network is not None:
            self._compiled.clear()
            self._history.clear()
            self._network = self.adapters = None
            release_memory()

    # Bound as a default: at interpreter shutdown module globals may be cleared first.
    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()

    def _prefill(self, row: Row, logits: NDArray[np.float32]) -> None:
        """Prefill a row and write its logits [row.logits, vocab]."""
        tokens, position = row.tokens, row.position
        if not self._use_past:
            tokens = np.concatenate([self._history.get(row.slot, tokens[:0])[:position], tokens])
            self._history[row.slot] = tokens
            position = 0
        wanted = turn = len(tokens) - row.logits  # first token with logits
        if row.logits == 0 or (row.logits == 1 and self._compiled.keys() != {"score"}):
            turn = len(tokens)  # the prefill graph suffices
        elif not self._use_past:
            turn = 0  # recomputed as a whole
        adapter = np.array([row.adapter_slot], np.int32)
        for kind, first, end, step in (
            ("prefill", 0, turn, self.info.chunk),
            ("score", turn, len(tokens), self.info.most_logits),
        ):
            for start in range(first, end, step):
                piece = tokens[None, start : min(start + step, end)]
                found = self._run(kind, adapter, piece, [position + start], [row.end], [row.slot])
                if kind == "score":
                    found = found[max(0, wanted - start) :]
                    logits[max(0, start - wanted) :][: len(found)] = found
                elif turn == len(tokens):
                    logits[:] = found

    def _decode(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        slots = [row.slot for row in rows]
        tokens = np.zeros((self.info.slots, 1), np.int32)
        position = np.full(self.info.slots, self.info.max_length - 1, np.int32)  # scratch position
        tokens[slots, 0] = [row.tokens[0] for row in rows]
        position[slots] = [row.position for row in rows]
        adapters = np.full(self.info.slots, BASE, np.int32)
        adapters[slots] = [row.adapter_slot for row in rows]
        logits = self._run("decode", adapters, tokens, position, position + 1)
        return logits if slots == list(range(self.info.slots)) else logits[slots]

    def _run(self, kind: str, adapters: NDArray[np.int32], *arrays: object) -> NDArray[np.float32]:
        if kind != "score":
            self.prepare()
        if kind not in self._compiled:
            self._compile(kind)
        if self.adapters is not None:
            arrays = (*arrays, adapters)
        inputs = [Tensor(np.asarray(array, np.int32)) for array in arrays]
        logits: NDArray[np.float32] = self._compiled[kind](*inputs).asnumpy()
        return logits

    def _compile(self, kind: str) -> bool:
        """Compile a graph or load it from the cache; whether it was a cache hit."""
        start = time.perf_counter()
        graph: nn.Cell = _CELLS[kind][self.adapters is not None](self._network)
        rows = self.info.slots if kind == "decode" else 1
        each = Tensor(np.zeros(rows, np.int32))
        # Position, length, slot (not for decode) and adapter slot.
        each_row = [each] * (2 + (kind != "decode") + (self.adapters is not None))
        inputs = [Tensor(np.zeros((rows, 1 + (kind != "decode")), np.int32)), *each_row]
        if kind != "decode":
            graph.set_inputs(Tensor(shape=[1, None], dtype=ms.int32), *each_row)
        graph.set_train(False)
        if self._options.pynative:
            self._compiled[kind] = graph
            return True
        purpose = "score" if kind == "score" else "generate"
        cached = self._graphs.compile(graph, *inputs, name=f"{kind} graph", purpose=purpose)
        self._compiled[kind] = graph
        self.compile_s += time.perf_counter() - start
        return cached
