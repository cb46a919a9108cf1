"""The backend over a graph of our own operators: rows together, as in the online one."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import AdapterSlots, BackendInfo, Row
from lite_runner.backends.batch_metadata import BatchMetadata, RowTokens
from lite_runner.backends.dynamic import cannot_copy, check_slots
from lite_runner.backends.engines.base import Engine
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir.manifest import Manifest, Operators


class NativeGraphBackend:
    """See `lite_runner.backends.base.Backend`."""

    adapters: AdapterSlots | None = None

    def __init__(
        self, manifest: Manifest, operators: Operators, engine: Engine, slots: int
    ) -> None:
        """`slots`: rows held at once; more than were exported is a ConfigError."""
        check_slots(manifest, slots)
        self.info = BackendInfo(
            engine=engine.name,
            vocab_size=manifest.model.vocab_size,
            slots=slots,
            max_length=manifest.seq_length,
            budget=operators.capacity,
            chunk=1,
            can_copy=False,
            can_continue=not manifest.model.length_dependent,
        )
        self.compile_s = 0.0
        self._engine, self._capacity = engine, operators.capacity
        self._most = manifest.batch_size  # rows of logits that the graph gives
        self._words = BatchMetadata(manifest.model, manifest.seq_length, operators.capacity)
        inputs = self._words.specs(self._most)
        if manifest.graphs["model"].inputs != inputs:
            raise ArtifactError(
                f"{manifest.graphs['model'].file}: takes {manifest.graphs['model'].inputs}, "
                f"expected {inputs}",
                "export the model again",
            )
        self._inputs = engine.bind("model", [one.shape for one in inputs])
        self._inputs[1][...] = self._words.table

    def prepare(self) -> None:
        """Compile the graph, before any row is in the cache."""
        if self.compile_s == 0.0:
            start = time.perf_counter()
            self._engine.run("model")  # a step without tokens
            self.compile_s = time.perf_counter() - start

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [sum of row.logits, vocab], in the order of the rows."""
        self.prepare()
        every = RowTokens.of(rows)
        logits = np.empty((len(every.wanted), self.info.vocab_size), np.float32)
        for part, here in every.parts(self._capacity, self._most):
            wanted = every.wanted[here]
            words, table = self._words.of(every, part, wanted, self._most)
            self._inputs[0][...] = words
            if self._words.new_tables:
                self._inputs[1][...] = table
            logits[here] = self._engine.run("model")[0][: len(wanted)]
        return logits

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """A ConfigError: the cache is inside the graph."""
        raise ConfigError(*cannot_copy("dynamic"))

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
