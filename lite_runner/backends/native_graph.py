"""Backend for an exported graph of the native kernels; continuous batching as in NativeBackend."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import AdapterSlots, BackendInfo, Row
from lite_runner.backends.batch_metadata import (
    BatchMetadata,
    StepLimits,
    TokenBatch,
    forward_in_steps,
)
from lite_runner.backends.dynamic import cannot_copy, check_slots
from lite_runner.backends.engines.base import Engine
from lite_runner.backends.step_sizes import unchunked
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir.manifest import Manifest, Operators


class NativeGraphBackend:
    """See `lite_runner.backends.base.Backend`."""

    adapters: AdapterSlots | None = None

    def __init__(
        self, manifest: Manifest, operators: Operators, engine: Engine, slots: int
    ) -> None:
        """`slots`: cache slots. Raises ConfigError if more than were exported."""
        check_slots(manifest, slots)
        self.info = BackendInfo(
            engine=engine.name,
            vocab_size=manifest.model.vocab_size,
            slots=slots,
            max_length=manifest.seq_length,
            budget=operators.capacity,
            chunk=unchunked(manifest.model, manifest.seq_length) or 1,
            can_copy=False,
            can_continue=manifest.model.keys_reusable,
            short_length=manifest.model.short_length,
            prefix=manifest.model.prefix,
        )
        self.compile_s = 0.0
        self._engine = engine
        self._most = manifest.batch_size  # rows of logits per step
        whole_rows = manifest.model.prefix is not None
        self._limits = StepLimits(operators.capacity, self._most, whole_rows=whole_rows)
        self._metadata = BatchMetadata(manifest.model, manifest.seq_length, operators.capacity)
        inputs = self._metadata.specs(self._most)
        if manifest.graphs["model"].inputs != inputs:
            raise ArtifactError(
                f"{manifest.graphs['model'].file}: takes {manifest.graphs['model'].inputs}, "
                f"expected {inputs}",
                "export the model again",
            )
        self._inputs = engine.bind("model", [one.shape for one in inputs])
        self._inputs[1][...] = self._metadata.table

    def prepare(self) -> None:
        """Compile the graph while the cache is empty."""
        if self.compile_s == 0.0:
            start = time.perf_counter()
            self._engine.run("model")  # an empty step
            self.compile_s = time.perf_counter() - start

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [sum of row.logits, vocab], in the order of rows and tokens."""
        self.prepare()
        return forward_in_steps(rows, self._limits, self.info.vocab_size, self._run)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Raises ConfigError: the cache is inside the graph."""
        raise ConfigError(*cannot_copy("dynamic"))

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _run(
        self, every: TokenBatch, part: slice, wanted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """One step over a part of the tokens -> logits after the `wanted` ones."""
        metadata, table = self._metadata.of(every, part, wanted, self._most)
        self._inputs[0][...] = metadata
        if self._metadata.new_tables:
            self._inputs[1][...] = table
        logits: NDArray[np.float32] = self._engine.run("model")[0][: len(wanted)]
        return logits
