"""Backend for a graph without KV cache: each step recomputes whole rows.

Shapes: b rows of the batch, s maximum positions per row. Row i of the batch is slot i.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import AdapterSlots, BackendInfo, Row
from lite_runner.backends.engines.base import Engine
from lite_runner.backends.graph_outputs import logits_of, select_wanted
from lite_runner.errors import ConfigError
from lite_runner.mindir.manifest import Manifest


class NoCacheBackend:
    """See `lite_runner.backends.base.Backend`.

    The graph takes the ids [b, s] of whole sequences, as with MindFormers' use_past=False.
    """

    adapters: AdapterSlots | None = None

    def __init__(self, manifest: Manifest, engine: Engine) -> None:
        self.info = static_batch_info(manifest, engine)
        self.compile_s = 0.0
        self._engine = engine
        # Token ids of each slot so far.
        self._ids = np.zeros((self.info.slots, self.info.max_length), np.int32)

    def prepare(self) -> None:
        """Compile the graph with padding."""
        if self.compile_s == 0.0:
            start = time.perf_counter()
            self._run(np.ones(self.info.slots, np.int32))
            self.compile_s = time.perf_counter() - start

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [k, vocab] after the last token of each row that asks for them.

        Raises ConfigError for a row longer than the exported sequence length.
        """
        lengths = np.ones(self.info.slots, np.int32)
        for row in rows:
            length = row.position + len(row.tokens)
            if length > self.info.max_length:
                raise ConfigError(
                    f"a row of {length} tokens, but the model was exported for sequences of "
                    f"{self.info.max_length}",
                    "export it again with a larger sequence length, or shorten the prompt",
                )
            self._ids[row.slot, row.position : length] = row.tokens
            self._ids[row.slot, length:] = 0  # clear a previous, longer sequence
            lengths[row.slot] = length
        self.prepare()
        return select_wanted(self._run(lengths)[[row.slot for row in rows]], rows)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]."""
        self._ids[list(targets)] = self._ids[list(sources)]

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _run(self, lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        (bound,) = self._engine.bind("model", [self._ids.shape])
        bound[...] = self._ids
        found = self._engine.run("model")
        return logits_of(found, self.info.slots, self.info.vocab_size, lengths - 1)


def static_batch_info(manifest: Manifest, engine: Engine, *, can_copy: bool = True) -> BackendInfo:
    """BackendInfo for graphs with a static batch and sequence length: no chunked prefill."""
    slots, length = manifest.batch_size, manifest.seq_length
    return BackendInfo(
        engine=engine.name,
        vocab_size=manifest.model.vocab_size,
        slots=slots,
        max_length=length,
        budget=slots * length,
        chunk=length,
        can_copy=can_copy,
        can_continue=manifest.model.keys_reusable,
        short_length=manifest.model.short_length,
        prefix=manifest.model.prefix,
    )
