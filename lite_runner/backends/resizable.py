"""Backend for the `resizable` layout: one graph with an external KV cache.

The graph (inputs: lite_runner.mindir.resizable_inputs) is resized between two uses: a *prefill* has
one row of any number of tokens, a *decode* one token of every slot. Resizing costs milliseconds, so
a decode keeps its shape while its rows fit: meanwhile the bound input arrays are the cache, and are
copied out only before the next resize.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import AdapterSlots, BackendInfo, Row
from lite_runner.backends.engines.base import Engine
from lite_runner.backends.graph_outputs import select_wanted
from lite_runner.backends.step_sizes import LONGEST_CHUNK, chunk_length, step_budget
from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import Manifest
from lite_runner.mindir.resizable_inputs import InputArrays, Shape, dynamic_inputs, inputs_of

Array = NDArray[np.float32]

SMALLEST_SPAN = 64  # keys of a decode; doubled when a row exceeds it


class ResizableBackend:
    """See `lite_runner.backends.base.Backend`."""

    adapters: AdapterSlots | None = None

    def __init__(self, manifest: Manifest, engine: Engine, slots: int) -> None:
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
                "export the model again",
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
        for cache in self._cache if self._decoding is None else self._inputs.past:
            cache[write, :, :used] = cache[read, :, :used]
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
        tokens, position = (
            np.zeros((self.info.slots, 1), np.int32),
            np.zeros(self.info.slots, np.int64),
        )
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
