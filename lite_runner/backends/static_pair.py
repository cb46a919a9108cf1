"""Backend for a static pair: every step runs all rows of the exported batch.

Shapes: b rows of the batch, s maximum positions per row. Row i of the batch is slot i.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import AdapterSlots, Row
from lite_runner.backends.dynamic import cannot_copy
from lite_runner.backends.engines.base import Engine
from lite_runner.backends.graph_outputs import logits_of, select_wanted
from lite_runner.backends.no_cache import static_batch_info
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir.manifest import GraphName, Manifest, TensorSpec
from lite_runner.mindir.pair_inputs import (
    arrays_of,
    inputs_named,
    same_but_for_ones,
    specs_of,
)


class StaticPairBackend:
    """See `lite_runner.backends.base.Backend`.

    An inactive slot gets a padding row, which only writes the last position of its slot; that one
    is never read before it is written. A pair with greedy sampling gives one-hot logits.
    """

    adapters: AdapterSlots | None = None

    def __init__(self, manifest: Manifest, engine: Engine) -> None:
        """Raises ArtifactError for graphs whose inputs no class of pair_inputs provides."""
        self.info = static_batch_info(manifest, engine, can_copy=False)
        self.compile_s = 0.0
        self._engine = engine
        self._inputs = inputs_named([spec.name for spec in manifest.graphs["prefill"].inputs])
        self._shapes: dict[GraphName, list[tuple[int, ...]]] = {}
        for name, graph in manifest.graphs.items():
            given = specs_of(self._inputs, name, self.info.slots, self.info.max_length)
            self._shapes[name] = [spec.shape for spec in graph.inputs]
            if not same_but_for_ones(given, graph.inputs):
                raise ArtifactError(
                    f"{graph.file}: takes {_shown(graph.inputs)}, but "
                    f"{type(self._inputs).__name__} gives {_shown(given)}"
                )

    def prepare(self) -> None:
        """Compile both graphs with padding rows."""
        if self.compile_s == 0.0:
            start = time.perf_counter()
            self._prefill([])
            self._increment([])
            self.compile_s = time.perf_counter() - start

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [k, vocab] after the last token of each row that asks for them.

        Raises ConfigError for a row longer than the exported sequence length. Chunks after a row's
        first one go through the increment graph token by token.
        """
        for row in rows:
            if (length := row.position + len(row.tokens)) > self.info.max_length:
                raise ConfigError(
                    f"a row of {length} tokens, but the model was exported for sequences of "
                    f"{self.info.max_length}",
                    "export it again with a larger sequence length, or shorten the prompt",
                )
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

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _prefill(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        ids = np.zeros((self.info.slots, self.info.max_length), np.int32)
        valid = np.zeros(self.info.slots, np.int32)
        for row in rows:
            ids[row.slot, : len(row.tokens)] = row.tokens
            valid[row.slot] = len(row.tokens)
        return self._run("prefill", ids, valid)[[row.slot for row in rows]]

    def _increment(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        ids = np.zeros((self.info.slots, 1), np.int32)
        valid = np.full(
            self.info.slots, self.info.max_length, np.int32
        )  # padding: at the last position
        for row in rows:
            ids[row.slot] = row.tokens
            valid[row.slot] = row.position + 1
        return self._run("increment", ids, valid)[[row.slot for row in rows]]

    def _run(
        self, graph: GraphName, ids: NDArray[np.int32], valid: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Logits [b, vocab] for ids [b, s or 1]; `valid` [b]: tokens per row, these included."""
        values = arrays_of(self._inputs, graph, ids, valid, self.info.max_length)
        bound = self._engine.bind(graph, self._shapes[graph])
        for array, value in zip(bound, values, strict=True):
            array[...] = value.reshape(array.shape)
        last = np.maximum(valid, 1) - 1
        return logits_of(self._engine.run(graph), self.info.slots, self.info.vocab_size, last)


def _shown(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in specs)
