"""The backends of exported models, one for each layout.

A *resizable* graph has an external KV cache (inputs: lite_runner.mindir.graph_inputs), and is
resized between two uses: a *prefill* has one row of any number of tokens, a *decode* one token of
every slot. Resizing costs milliseconds, so a decode keeps its shape while its rows fit: meanwhile
the bound input arrays are the cache, and are copied out only before the next resize.

A *static pair*, and a graph without a cache, run all b rows of the exported batch in every step, of
at most s positions; row i of the batch is slot i.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import (
    LONGEST_CHUNK,
    Backend,
    BackendInfo,
    Row,
    check_rows,
    chunk_length,
    step_budget,
)
from lite_runner.backends.lite.engine import EngineOptions, GraphEngine, start_engine
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir.graph_inputs import (
    InputArrays,
    Shape,
    arrays_of,
    dynamic_inputs,
    inputs_named,
    inputs_of,
    same_but_for_ones,
    specs_of,
)
from lite_runner.mindir.manifest import AGAIN, GraphName, Manifest, TensorSpec, is_pair

if TYPE_CHECKING:
    from lite_runner.backends.adapter_slots import AdapterSlots

Array = NDArray[np.float32]

SMALLEST_SPAN = 64  # keys of a decode; doubled when a row exceeds it


def open_exported(
    graphs: Mapping[GraphName, Path], manifest: Manifest, options: EngineOptions, *, slots: int
) -> Backend:
    """Load the model with `slots` cache slots. Raises RunnerError if that fails."""
    engine = start_engine(graphs, manifest, options)
    if manifest.fits_any:
        return ResizableBackend(manifest, engine, slots)
    if is_pair(manifest.layout):
        return StaticPairBackend(manifest, engine)
    return NoCacheBackend(manifest, engine)


class ResizableBackend:
    """See `lite_runner.backends.Backend`."""

    adapters: AdapterSlots | None = None

    def __init__(self, manifest: Manifest, engine: GraphEngine, slots: int) -> None:
        """Raises ArtifactError if the graph's inputs are not those of the layout."""
        self._model = model = manifest.model
        self._engine = engine
        length = manifest.seq_length
        self.info = BackendInfo(
            engine=engine.name,
            vocab_size=model.vocab_size,
            slots=slots,
            max_length=length,
            budget=step_budget(slots, LONGEST_CHUNK),
            chunk=LONGEST_CHUNK,  # see `chunks`
            can_continue=model.keys_reusable,
            short_length=model.short_length,
        )
        self.compile_s = 0.0
        inputs, wanted = manifest.graphs["model"].inputs, dynamic_inputs(model)
        if inputs != wanted:
            pairs = zip(inputs, wanted, strict=False)
            got, expected = next(
                (pair for pair in pairs if pair[0] != pair[1]), (len(inputs), len(wanted))
            )
            raise ArtifactError(
                f"{manifest.model_name}: the graph's inputs are not those of the model: got {got}, "
                f"expected {expected}",
                AGAIN,
            )
        self._filled = np.zeros(slots, np.int64)  # positions written per slot
        shape = (slots, model.n_kv_heads, decode_span(length - 1), model.head_dim)
        # Memory pages are allocated on first write.
        self._cache = [np.zeros(shape, np.float32) for _ in range(2 * model.num_layers)]
        self._inputs = InputArrays(model, length)
        self._decoding: Shape | None = None  # the bound cache inputs are the cache up to its length

    def prepare(self) -> None:
        """Nothing is compiled."""

    def forward(self, rows: Sequence[Row]) -> Array:
        """Logits [k, vocab] after the last token of each row that asks for them."""
        check_rows(rows, self.info)
        logits = np.empty((len(rows), self.info.vocab_size), np.float32)
        decoded = []
        for index, row in enumerate(rows):
            if len(row.tokens) == 1 and not row.length:  # not a prompt chunk
                decoded.append(index)
            else:
                logits[index] = self._prefill(row)
        if decoded:
            logits[decoded] = self._decode([rows[index] for index in decoded])
        return select_wanted(logits, rows)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]; all are read before any is written."""
        read, write = list(sources), list(targets)
        used = int(self._filled[read].max(initial=0))
        bound = 0 if self._decoding is None else self._decoding.past
        for past in self._inputs.past if bound else ():
            past[write, :, :used] = past[read, :, :used]
        for cache in self._cache:  # behind what is bound, which a longer slot has
            cache[write, :, bound:used] = cache[read, :, bound:used]
        self._filled[write] = self._filled[read]

    def close(self) -> None:
        """Close the engine; idempotent."""
        self._inputs.clear()
        self._cache = []
        self._engine.close()

    def _prefill(self, row: Row) -> Array:
        logits: Array
        end = row.position + len(row.tokens)
        for start, count in chunks(self._model.num_heads, row.position, end):
            # Axes cannot be empty: without a past, one masked position.
            self._bind(Shape(1, count, max(start, 1)))
            for past, cache in zip(self._inputs.past, self._cache, strict=True):
                past[:] = cache[row.slot, :, : past.shape[2]]
            at = start - row.position
            outputs = self._run(
                row.tokens[None, at : at + count], np.array([start]), np.array([row.end])
            )
            for cache, new in zip(self._cache, self._by_layer(outputs[1]), strict=True):
                cache[row.slot, :, start : start + count] = new[0]
            logits = outputs[0][0]
        self._filled[row.slot] = end
        return logits

    def _decode(self, rows: Sequence[Row]) -> Array:
        slots = [row.slot for row in rows]
        # Inactive slots compute token 0 at position 0; the result is not read.
        tokens = np.zeros((self.info.slots, 1), np.int32)
        position = np.zeros(self.info.slots, np.int64)
        tokens[slots, 0] = [row.tokens[0] for row in rows]
        position[slots] = [row.position for row in rows]
        span = decode_span(int(position.max()))
        if self._decoding is None or self._decoding.past < span - 1:
            shape = Shape(self.info.slots, 1, span - 1)
            self._bind(shape)
            for past, cache in zip(self._inputs.past, self._cache, strict=True):
                past[:] = cache[:, :, : shape.past]
            self._decoding = shape
        outputs = self._run(tokens, position, position + 1)
        for past, new in zip(self._inputs.past, self._by_layer(outputs[1]), strict=True):
            for slot in slots:
                past[slot, :, position[slot]] = new[slot, :, 0]
        self._filled[slots] = position[slots] + 1
        return outputs[0][slots]

    def _by_layer(self, new: Array) -> list[Array]:
        """Keys and values of each layer in turn: [B, K, S, D] each."""
        kv = self._model.n_kv_heads
        return [new[:, at : at + kv] for at in range(0, new.shape[1], kv)]

    def _bind(self, shape: Shape) -> None:
        """Resize the graph and fill in the inputs that depend only on the shape."""
        if self._decoding is not None:
            for past, cache in zip(self._inputs.past, self._cache, strict=True):
                cache[:, :, : self._decoding.past] = past
            self._decoding = None
        specs = inputs_of(self._model, shape)
        self._inputs.bind(self._engine.bind("model", [spec.shape for spec in specs]), shape)

    def _run(
        self, tokens: NDArray[np.int32], start: NDArray[np.int64], length: NDArray[np.int64]
    ) -> list[Array]:
        """tokens [B, S], start [B]: position id of each row's first token, length [B]: of the
        row."""
        self._inputs.fill(tokens, start, length)
        return self._engine.run("model")


def chunks(heads: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Start and length of each prefill chunk of tokens start .. end. Splitting a prompt at
    multiples of LONGEST_CHUNK does not change them."""
    while start < end:
        keys = start + LONGEST_CHUNK  # memory grows with the cached length
        count = min(end - start, chunk_length(heads, keys))
        yield start, count
        start += count


def decode_span(position: int) -> int:
    """Keys of a decode whose last token is at `position`: a power of two, for few sizes.

    One is the token's own; the others are cached, with one position to write it to.
    """
    return int(max(SMALLEST_SPAN, 1 << math.ceil(math.log2(position + 2))))


class _StaticBackend:
    """Graphs of a static batch and sequence length: no chunked prefill, and all rows of the batch
    in every step. What is not asked for is padding."""

    adapters: AdapterSlots | None = None

    def __init__(self, manifest: Manifest, engine: GraphEngine, *, can_copy: bool) -> None:
        """Raises ArtifactError for graphs whose inputs no class of graph_inputs provides."""
        slots, length, model = manifest.batch_size, manifest.seq_length, manifest.model
        self.info = BackendInfo(
            engine=engine.name,
            vocab_size=model.vocab_size,
            slots=slots,
            max_length=length,
            budget=slots * length,
            chunk=length,
            can_copy=can_copy,
            can_continue=model.keys_reusable,
            short_length=model.short_length,
            prefix=model.prefix,
        )
        self.compile_s = 0.0
        self._engine = engine
        first = next(graph for name, graph in manifest.graphs.items() if name != "increment")
        self._inputs = inputs_named([spec.name for spec in first.inputs])
        self._shapes = {
            name: [spec.shape for spec in graph.inputs] for name, graph in manifest.graphs.items()
        }

    def prepare(self) -> None:
        """Compile with padding."""
        if self.compile_s == 0.0:
            start = time.perf_counter()
            self._compile()
            self.compile_s = time.perf_counter() - start

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _compile(self) -> None:
        raise NotImplementedError

    def _run(
        self, graph: GraphName, ids: NDArray[np.int32], valid: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Logits [b, vocab] for ids [b, s or 1]; `valid` [b]: tokens per row, these included."""
        kind: GraphName = "increment" if graph == "increment" else "prefill"
        values = arrays_of(self._inputs, kind, ids, valid, self.info.max_length)
        bound = self._engine.bind(graph, self._shapes[graph])
        for array, value in zip(bound, values, strict=True):
            array[...] = value.reshape(array.shape)
        last = np.maximum(valid, 1) - 1
        return logits_of(self._engine.run(graph), self.info.slots, self.info.vocab_size, last)


class StaticPairBackend(_StaticBackend):
    """See `lite_runner.backends.Backend`.

    An inactive slot gets a padding row, which only writes the last position of its slot; that one
    is never read before it is written. A pair with greedy sampling gives one-hot logits.
    """

    def __init__(self, manifest: Manifest, engine: GraphEngine) -> None:
        """Raises ArtifactError for graphs with other inputs than those of their decoder."""
        super().__init__(manifest, engine, can_copy=False)
        for name, graph in manifest.graphs.items():
            given = specs_of(self._inputs, name, self.info.slots, self.info.max_length)
            if not same_but_for_ones(given, graph.inputs):
                raise ArtifactError(
                    f"{graph.file}: takes {_shown(graph.inputs)}, but "
                    f"{type(self._inputs).__name__} gives {_shown(given)}"
                )

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [k, vocab] after the last token of each row that asks for them.

        Raises ConfigError for a row longer than the exported sequence length. Chunks after a row's
        first one go through the increment graph token by token.
        """
        check_static_rows(rows, self.info)
        self.prepare()
        logits = np.empty((len(rows), self.info.vocab_size), np.float32)
        if first := [index for index, row in enumerate(rows) if row.position == 0]:
            logits[first] = self._prefill([rows[index] for index in first])
        later = [index for index, row in enumerate(rows) if row.position > 0]
        for step in range(max((len(rows[index].tokens) for index in later), default=0)):
            now = [index for index in later if step < len(rows[index].tokens)]
            pieces = [
                Row(row.slot, row.tokens[step : step + 1], row.position + step)
                for row in (rows[index] for index in now)
            ]
            logits[now] = self._increment(pieces)
        return select_wanted(logits, rows)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Raises ConfigError: the cache is inside the graphs."""
        raise ConfigError(*cannot_copy("static_pair"))

    def _compile(self) -> None:
        self._prefill([])
        self._increment([])

    def _prefill(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        ids = np.zeros((self.info.slots, self.info.max_length), np.int32)
        valid = np.zeros(self.info.slots, np.int32)
        for row in rows:
            ids[row.slot, : len(row.tokens)] = row.tokens
            valid[row.slot] = len(row.tokens)
        return self._run("prefill", ids, valid)[[row.slot for row in rows]]

    def _increment(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        ids = np.zeros((self.info.slots, 1), np.int32)
        # Padding is at the last position.
        valid = np.full(self.info.slots, self.info.max_length, np.int32)
        for row in rows:
            ids[row.slot] = row.tokens
            valid[row.slot] = row.position + 1
        return self._run("increment", ids, valid)[[row.slot for row in rows]]


def _shown(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in specs)


def cannot_copy(layout: str, *, given: bool = True) -> tuple[str, str]:
    """Message and hint for a layout whose cache slots cannot be copied. `given`: the run names the
    graphs, which no other backend runs."""
    return (
        "beams and num_return_sequences copy the cache from row to row; graphs of the"
        f" {layout} layout keep theirs inside, where it cannot be copied",
        "export the model again with export.layout=resizable"
        if given
        else "export.layout=resizable, or backend=native",
    )


class NoCacheBackend(_StaticBackend):
    """See `lite_runner.backends.Backend`.

    The graph takes whole sequences [b, s], as with MindFormers' use_past=False, and what else a
    prefill takes.
    """

    def __init__(self, manifest: Manifest, engine: GraphEngine) -> None:
        super().__init__(manifest, engine, can_copy=True)
        # Token ids of each slot so far.
        self._ids = np.zeros((self.info.slots, self.info.max_length), np.int32)

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [k, vocab] after the last token of each row that asks for them.

        Raises ConfigError for a row longer than the exported sequence length.
        """
        check_static_rows(rows, self.info)
        lengths = np.ones(self.info.slots, np.int32)
        for row in rows:
            length = row.position + len(row.tokens)
            self._ids[row.slot, row.position : length] = row.tokens
            self._ids[row.slot, length:] = 0  # clear a previous, longer sequence
            lengths[row.slot] = length
        self.prepare()
        logits = self._run("model", self._ids, lengths)
        return select_wanted(logits[[row.slot for row in rows]], rows)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]."""
        self._ids[list(targets)] = self._ids[list(sources)]

    def _compile(self) -> None:
        self._run("model", self._ids, np.ones(self.info.slots, np.int32))


def check_static_rows(rows: Sequence[Row], info: BackendInfo) -> None:
    """As `check_rows`. Raises ConfigError for a row longer than the exported sequence length."""
    for row in rows:
        if (length := row.position + len(row.tokens)) > info.max_length:
            raise ConfigError(
                f"a row of {length} tokens, but the model was exported for sequences of "
                f"{info.max_length}",
                "export it again with a larger sequence length, or shorten the prompt",
            )
    check_rows(rows, info)


def logits_of(
    outputs: Sequence[NDArray[Any]], rows: int, vocab: int, last: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Logits [b, V] after each row's last token, at position `last` [b].

    They are the first float output [b, V], [b, 1, V], [b, s, V] or [b * s, V]; else the argmax
    token of a sampled graph, int32 [b], [b, 1] or [b * s, 1], becomes one-hot logits. Raises
    ArtifactError if there is neither.
    """
    for output in outputs:
        if output.dtype.kind == "f" and output.ndim > 1 and output.shape[-1] == vocab:
            logits = output.reshape(rows, -1, vocab)
            chosen: NDArray[np.float32] = logits[
                np.arange(rows), _last_index(logits.shape[1], last)
            ]
            return chosen.astype(np.float32)
    for output in outputs:
        if output.dtype.kind == "i" and output.size % rows == 0:
            tokens = output.reshape(rows, -1)
            token = tokens[np.arange(rows), _last_index(tokens.shape[1], last)]
            return np.equal(token[:, None], np.arange(vocab)).astype(np.float32)
    got = ", ".join(f"{output.dtype} {list(output.shape)}" for output in outputs)
    raise ArtifactError(f"the graph returns {got}, expected logits of {vocab} tokens, or tokens")


def select_wanted(logits: NDArray[np.float32], rows: Sequence[Row]) -> NDArray[np.float32]:
    """The logits [k, V] that the rows ask for, of those after each row's last token [rows, V]."""
    wanted = [index for index, row in enumerate(rows) if row.logits]
    return logits if len(wanted) == len(rows) else logits[wanted]


def _last_index(positions: int, last: NDArray[np.int32]) -> NDArray[np.int32]:
    """Index of each row's last position among the graph's `positions`."""
    return np.minimum(last, positions - 1)
