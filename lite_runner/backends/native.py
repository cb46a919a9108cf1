"""The native backend: our own CPU kernels (lite_runner.native).

A step takes tokens of any rows up to its capacity, prefill and decode together (continuous
batching). Logits are batch-invariant: bit-identical whatever else is in the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.adapter_slots import AdapterPools, LoraSlots
from lite_runner.backends.base import BASE, AdapterSlots, BackendInfo, Row
from lite_runner.backends.batch_metadata import (
    BatchMetadata,
    StepLimits,
    TokenBatch,
    forward_in_steps,
)
from lite_runner.backends.step_sizes import (
    cache_length,
    rows_at_once,
    step_capacity,
    unchunked,
)
from lite_runner.native.model import NativeOptions as NativeOptions
from lite_runner.weights.lora.adapter import Adapter


class Executor(Protocol):
    """Computes steps of a packed model, whose layers, KV cache and adapter pools it keeps."""

    @property
    def name(self) -> str: ...

    @property
    def adapters(self) -> AdapterPools: ...

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far."""
        ...

    def resize(self, options: NativeOptions, capacity: int, table: NDArray[np.float32]) -> None:
        """Reallocate the caches, empty, for these options and steps of `capacity` tokens with a
        rotary `table` of this shape."""
        ...

    def prepare(self) -> None:
        """Compile steps with few logits."""
        ...

    def rows(self, wanted: int, most: int) -> int:
        """Rows of logits that a step with `wanted` of them computes: at least as many; `most`: the
        largest number that steps have, besides one per slot."""
        ...

    def run(
        self,
        metadata: NDArray[np.int32],
        table: NDArray[np.float32],
        adapter_slots: NDArray[np.int32] | None,
        rows: int,
    ) -> NDArray[np.float32]:
        """Logits [rows, vocab] of a step with `metadata` (see BatchMetadata), a rotary `table` and
        the adapter slot per token [capacity], None without adapters. They may be overwritten by
        the next step."""
        ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cache slot sources[i] to targets[i]; all are read before any is written."""
        ...

    def close(self) -> None:
        """Release the memory."""
        ...


class NativeBackend:
    """See `lite_runner.backends.base.Backend`."""

    def __init__(
        self,
        config: Decoder,
        executor: Executor,
        options: NativeOptions,
        adapters: Sequence[Adapter] = (),
        *,
        threads: int | None = None,
    ) -> None:
        """`adapters`: the initial ones, if `options` have adapter slots; `threads` None: one per
        processor available to this process."""
        self._executor: Executor | None = executor
        native.set_threads(threads)
        self._config = config
        self.adapters: AdapterSlots | None
        self.adapters = (
            LoraSlots(executor.adapters, adapters, options.lora) if options.lora else None
        )
        self._configure(options)

    def _configure(self, options: NativeOptions) -> None:
        """Set everything that depends on the cache size."""
        assert self._executor is not None
        config = self._config
        length = cache_length(options.length, config.seq_length)
        self._options = options = replace(options, length=length)
        whole = unchunked(config, length)
        self._capacity = step_capacity(options.slots, whole)
        self.info = BackendInfo(
            engine=f"{self._executor.name}, {native.instructions()} kernels",
            vocab_size=config.vocab_size,
            slots=options.slots,
            max_length=options.length,
            budget=self._capacity,
            chunk=whole or 1,
            most_logits=rows_at_once(config.vocab_size, self._capacity),
            can_continue=config.keys_reusable,
            short_length=config.short_length,
            prefix=config.prefix,
        )
        self._metadata = BatchMetadata(config, self.info.max_length, self._capacity)
        self._executor.resize(options, self._capacity, self._metadata.table)

    @property
    def compile_s(self) -> float:
        return 0.0 if self._executor is None else self._executor.compile_s

    def grow(self, slots: int, length: int) -> None:
        """Reallocate the cache; the weights and the adapters stay."""
        self._configure(replace(self._options, slots=slots, length=length))

    def prepare(self) -> None:
        """Compile steps with few logits."""
        assert self._executor is not None
        self._executor.prepare()

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [sum of row.logits, vocab], in the order of rows and tokens."""
        most = max(self.info.slots, self.info.most_logits)
        limits = StepLimits(self._capacity, most, whole_rows=self.info.prefix is not None)
        return forward_in_steps(rows, limits, self.info.vocab_size, self._run)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]; all are read before any is written."""
        assert self._executor is not None
        self._executor.copy(sources, targets)
        self._metadata.copy(sources, targets)

    def close(self) -> None:
        """Release the model and its memory."""
        if self._executor is not None:
            self._executor.close()
            self._executor = self.adapters = None

    # Bound as a default: at interpreter shutdown module globals may be cleared first.
    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()

    def _run(
        self, every: TokenBatch, part: slice, wanted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """One step over a part of the tokens -> logits after the `wanted` ones."""
        assert self._executor is not None
        rows = self._executor.rows(len(wanted), self.info.most_logits)
        metadata, table = self._metadata.of(every, part, wanted, rows)
        slots = self._adapter_slots(every.rows, every.owner[part])
        return self._executor.run(metadata, table, slots, rows)[: len(wanted)]

    def _adapter_slots(
        self, rows: Sequence[Row], owner: NDArray[np.int64]
    ) -> NDArray[np.int32] | None:
        """Adapter slot per token [capacity]."""
        if self.adapters is None:
            return None
        found = np.full(self._capacity, BASE, np.int32)
        found[: len(owner)] = np.array([row.adapter_slot for row in rows])[owner]
        return found
