"""The MindSpore backend: a network built from a checkpoint, on CPU or Ascend.

Two graphs share the weights and the cache: *prefill* takes one row of any length (a dynamic
shape), *decode* one token of every slot (a static shape, which runs a quarter faster). Each row is
prefilled alone, so other rows cannot change its logits. A third, *score*, is a prefill with logits
after every token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.graph.api import _cell_graph_executor
from numpy.typing import NDArray

from lite_runner.architectures import network_code
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import (
    BASE,
    BackendInfo,
    Row,
    cache_length,
    check_rows,
    chunk_length,
    rows_at_once,
    step_budget,
    unchunked,
)
from lite_runner.backends.collectives import tensor_parallel
from lite_runner.backends.mindspore.device import choose_attention, computes_fused, set_device
from lite_runner.backends.mindspore.graph_cache import GraphCache
from lite_runner.config.sections import Ranks
from lite_runner.networks import decoder
from lite_runner.networks.ascend_layers import LinearIntegers
from lite_runner.networks.decoder import network_of
from lite_runner.networks.layers import BuildOptions, CacheSize, Weights, resize
from lite_runner.networks.lora import EmbeddingLora, Lora
from lite_runner.records import dataclass
from lite_runner.system.memory import return_freed
from lite_runner.weights.lora.adapter import Adapter, LoraSize
from lite_runner.weights.read_ahead import QuantizedWeights


@dataclass(frozen=True)
class MindSporeOptions:
    """Options of a MindSpore backend."""

    slots: int  # cache slots
    length: int  # maximum tokens per row, prompt and generated
    dtype: str = "float32"
    device: str = "CPU"
    device_id: int = 0
    threads: int | None = None  # None: MindSpore's default
    use_past: bool = True  # False: no cache, every step recomputes the whole row
    ranks: Ranks = Ranks()
    vocab_parallel: bool = True  # with several ranks: shard the embedding and the head too
    lora: LoraSize | None = None  # adapter slots; None: base model only
    integer_input: bool = False  # a8w8: inputs of int8 weights are quantized too
    pynative: bool = False  # eager mode: nothing is compiled, and each step is slower


# Graphs without and with adapters.
_CELLS: dict[str, tuple[type[nn.Cell], type[nn.Cell]]] = {
    "prefill": (decoder.Prefill, decoder.LoraPrefill),
    "decode": (decoder.Decode, decoder.LoraDecode),
    "score": (decoder.Score, decoder.LoraScore),
}


class MindSporeBackend:
    """See `lite_runner.backends.Backend`.

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
        from lite_runner.backends.adapter_slots import AdapterSlots

        self._network: nn.Cell | None = None
        self._compiled: dict[str, nn.Cell] = {}
        self._history: dict[int, NDArray[np.int32]] = {}  # use_past=False: tokens of each slot
        self.compile_s = 0.0  # so far; included in the time of the forward that compiled
        options = replace(options, length=cache_length(options.length, config.seq_length))
        network = self._network = build_network(config, weights, options)
        self.adapters = (
            AdapterSlots(CellPools(network, options.lora), adapters, options.lora)
            if options.lora
            else None
        )
        self._config = config
        self._use_past = options.use_past
        self._configure(network, options)

    def _configure(self, network: nn.Cell, options: MindSporeOptions) -> None:
        """Set everything that depends on the cache size."""
        _break_cycles(network)
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
        self._graphs = GraphCache(_graph_key(network, config, options))

    def grow(self, slots: int, length: int, cache_bytes: int | None = None) -> None:
        """Reallocate the cache; the weights and the adapters stay."""
        assert self._network is not None
        self._compiled.clear()
        options = replace(
            self._options, slots=slots, length=cache_length(length, self._config.seq_length)
        )
        if self._use_past:
            resize(self._network, CacheSize(options.slots, options.length))
        self._configure(self._network, options)
        _release_memory()

    def prepare(self) -> None:
        """Compile the graphs of a generation; else `forward` compiles each one when it needs it.

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
        check_rows(rows, self.info, 0 if self.adapters is None else self.adapters.slots)
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
        _copy_slots(caches, self.info.slots, sources, targets)

    def close(self) -> None:
        """Release the network and its memory."""
        if self._network is not None:
            self._compiled.clear()
            self._history.clear()
            self._network = self.adapters = None
            _release_memory()

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
        for needed in ("prefill", kind) if kind == "decode" else (kind,):  # in prepare's order
            if needed not in self._compiled:
                self._compile(needed)
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


def build_network(
    config: Decoder, weights: Weights | QuantizedWeights, options: MindSporeOptions
) -> nn.Cell:
    """Set the device, and build this rank's network from its shard of the weights.

    `config` is the unsharded model. QuantizedWeights need Ascend's quantized operators. Several
    ranks need a rendezvous first: see `lite_runner.backends.collectives`.
    """
    set_device(options.device, options.device_id, options.threads, pynative=options.pynative)
    fused = computes_fused(options.device, pynative=options.pynative)
    if fused:
        choose_attention()
    build = BuildOptions(
        CacheSize(options.slots, options.length) if options.use_past else None,
        getattr(ms, options.dtype),
        tensor_parallel(options.ranks, vocab_parallel=options.vocab_parallel),
        options.lora,
        fused,
        options.integer_input,
    )
    if isinstance(weights, QuantizedWeights):
        weights = LinearIntegers(weights, config)
    return network_of(config.shard(options.ranks.tensor), weights, build)


def _graph_key(network: nn.Cell, config: Decoder, options: MindSporeOptions) -> dict[str, object]:
    """Everything that the compiled graphs of a network depend on: see GraphCache."""
    lora = options.lora
    return {
        "model": asdict(config),
        "options": asdict(replace(options, lora=None)) | {"threads": None},
        "fused": computes_fused(options.device, pynative=options.pynative),
        "adapters": lora and [lora.slots, lora.rank, sorted(lora.targets)],
        # Quantized weights, per column or per group, use other operators than floats.
        "weights": [
            [one.name, list(one.shape), str(one.dtype)] for one in network.get_parameters()
        ],
        "network": network_code(config),
    }


class CellPools:
    """See `lite_runner.backends.adapter_slots.AdapterPools`."""

    def __init__(self, network: nn.Cell, size: LoraSize | None) -> None:
        cells = [cell for _, cell in network.cells_and_names()]
        self._layers = [cell for cell in cells if isinstance(cell, Lora) and cell.names]
        self._tables = [cell for cell in cells if isinstance(cell, EmbeddingLora) and cell.names]
        self.names = {name for cell in self._layers for name in cell.names}
        self.names |= {name for table in self._tables for name in table.names}
        self.holds_bfloat16 = False  # adapters have the cells' compute type
        self._size = size
        held = [part for cell in self._layers for part in (cell.a, *cell.b)]
        for table in self._tables:
            held += [table.a, table.b]
        self.nbytes = sum(one.nbytes for one in held)

    def load(self, adapter: Adapter, slot: int) -> None:
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


def _copy_slots(
    caches: Iterable[Parameter], slots: int, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Copy slot sources[i] to targets[i]; all are read before any is written.

    The first axis of each cache is slot-major, with `slots` slots.
    """
    update, gather = ops.ScatterUpdate(), ops.Gather()
    for cache in caches:
        height = cache.shape[0] // slots
        span = np.arange(height, dtype=np.int32)
        read, write = (
            Tensor((np.array(chosen, np.int32)[:, None] * height + span).reshape(-1))
            for chosen in (sources, targets)
        )
        update(cache, write, gather(cache, read, 0))


def _break_cycles(network: nn.Cell) -> None:
    """Break the reference cycles between parameters and their C++ descriptions, invisible to
    Python's garbage collector, which would keep the memory of a closed network."""
    for parameter in network.get_parameters():
        parameter.param_info.obj = None


def _release_memory() -> None:
    """Release the memory of networks that were closed or resized: the compiler refers to the last
    one's parameters. Compiled graphs stay: see PreTrainedModel.close."""
    _cell_graph_executor._graph_executor.set_weights_values({})
    # malloc's mmap threshold is dynamic: large arrays may be in the heap too.
    return_freed()
