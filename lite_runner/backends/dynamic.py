"""Backend for artifacts of the dynamic layout: one graph, one row at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import AdapterSlots, BackendInfo, Row
from lite_runner.backends.engines.base import Engine
from lite_runner.backends.graph_outputs import select_wanted
from lite_runner.backends.step_sizes import chunk_length, step_budget, unchunked
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.mindir.dynamic_inputs import INPUTS
from lite_runner.mindir.manifest import Manifest


class DynamicBackend:
    """See `lite_runner.backends.base.Backend`."""

    adapters: AdapterSlots | None = None

    def __init__(self, manifest: Manifest, engine: Engine, slots: int) -> None:
        """`slots`: cache slots. Raises ConfigError if more than were exported."""
        check_slots(manifest, slots)
        if (got := manifest.graphs["model"].inputs) != INPUTS:
            raise ArtifactError(
                f"{manifest.model_name}: the graph takes {got}, expected {INPUTS}",
                "export the model again",
            )
        model, length = manifest.model, manifest.seq_length
        chunk = chunk_length(model.num_heads, length, unchunked(model, length))
        self.info = BackendInfo(
            engine=engine.name,
            vocab_size=manifest.model.vocab_size,
            slots=slots,
            max_length=manifest.seq_length,
            budget=step_budget(slots, chunk),
            chunk=chunk,
            can_copy=False,
            can_continue=manifest.model.keys_reusable,
            short_length=manifest.model.short_length,
            prefix=manifest.model.prefix,
        )
        self.compile_s = 0.0
        self._engine = engine

    def prepare(self) -> None:
        """Compile the graph while the cache is empty."""
        if self.compile_s == 0.0:
            start = time.perf_counter()
            self._run(np.zeros(2, np.int32), 0, 2, 0)
            self.compile_s = time.perf_counter() - start

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [k, vocab] after the last token of each row that asks for them."""
        self.prepare()
        logits = np.empty((len(rows), self.info.vocab_size), np.float32)
        for index, row in enumerate(rows):
            for start in range(0, len(row.tokens), self.info.chunk):
                piece = row.tokens[start : start + self.info.chunk]
                logits[index] = self._run(piece, row.position + start, row.end, row.slot)
        return select_wanted(logits, rows)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Raises ConfigError: the cache is inside the graph."""
        raise ConfigError(*cannot_copy("dynamic"))

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _run(
        self, tokens: NDArray[np.int32], position: int, length: int, slot: int
    ) -> NDArray[np.float32]:
        inputs = self._engine.bind("model", [(1, len(tokens)), (1,), (1,), (1,)])
        for array, value in zip(inputs, (tokens, position, length, slot), strict=True):
            array[...] = value
        logits: NDArray[np.float32] = self._engine.run("model")[0][0]
        return logits


def check_slots(manifest: Manifest, slots: int) -> None:
    """Raise ConfigError for more slots than were exported."""
    if slots > manifest.batch_size:
        raise ConfigError(
            f"{slots} rows at once, but {manifest.model_name} was exported for "
            f"{manifest.batch_size}",
            "export it again with a larger batch size, or use a smaller predict_batch_size",
        )


def cannot_copy(layout: str) -> tuple[str, str]:
    """Message and hint for a layout whose cache slots cannot be copied."""
    return (
        f"beams and num_return_sequences copy the cache from row to row, which a graph of the "
        f"{layout} layout cannot: it keeps the cache to itself",
        "export with the resizable layout, or run with backend=ms",
    )
