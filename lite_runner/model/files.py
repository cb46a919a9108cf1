"""The files of a model: where they are, what they hold, and their tensors, opened but not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner.config.quantization import Quantization
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.sizing.need import readable
from lite_runner.weights.checkpoint import PICKLES, open_with_lora
from lite_runner.weights.lora.merge import merged
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.quantization.rounding import with_matrices_in
from lite_runner.weights.random import random_checkpoint
from lite_runner.weights.sharding.pieces import pieces
from lite_runner.weights.sharding.shard_manifest import rank_folders

if TYPE_CHECKING:
    from lite_runner.architectures.spec import Decoder
    from lite_runner.config.schema import DType
    from lite_runner.model.exported_model import ExportedModel
    from lite_runner.weights.formats.gguf_file import GGUFFile
    from lite_runner.weights.lora.adapter import Adapter
    from lite_runner.weights.tensor import LazyTensor

RANDOM = "random"
# Suffixes of files that hold weights; the second where there are none of the first.
WEIGHTS = ((".safetensors", ".ckpt", ".gguf"), PICKLES)


@dataclass(frozen=True)
class ModelFiles:
    """A located model: its source, its description, and how its weights are to be read."""

    source: str  # as the config names it; "random" for weights made from the seed
    path: Path | None  # None: random weights, an exported model, or not fetched
    model: Decoder
    seed: int  # of random weights
    exported: ExportedModel | None = None  # an exported model, which needs no checkpoint
    strategy: Path | None = None  # layout of a sharded checkpoint that has no manifests
    auto_trans: bool = False  # whether a checkpoint with another layout is resharded
    verified: bool = False  # whether `verify` has been called, maybe by another process
    base: Decoder | None = None  # with an adapter: the model that it is merged into
    adapter: Adapter | None = None
    quantization: Quantization = Quantization()
    held: Mapping[str, LazyTensor] | None = None  # this rank's tensors, in memory; None: on disk
    rounded: DType = "float32"  # wider matrices are rounded to it; integers stay
    # The opened GGUF, held so that its header is parsed once: see `gguf_at`.
    gguf: GGUFFile | None = field(default=None, compare=False, repr=False)

    @property
    def bfloat16_input(self) -> bool:
        """Whether the native operators round what multiplies bfloat16 to it."""
        return self.rounded == "bfloat16" and self.quantization.quant == "none"

    def tensors(
        self, ranks: Ranks | None = None, *, vocab_parallel: bool = True
    ) -> Mapping[str, LazyTensor]:
        """Every tensor, or one rank's shards, by MindFormers' names; checked but not read.

        Quantized matrices have their integers, in one rank; others are `rounded`. Raises
        ArtifactError.
        """
        tensors = self._unrounded(ranks or Ranks(), vocab_parallel)
        quantized = self.quantization.rounds
        return tensors if quantized else with_matrices_in(tensors, self.rounded)

    def whole(self) -> Mapping[str, LazyTensor]:
        """Every tensor of the model: shards joined, the adapter merged. Raises ArtifactError."""
        if self.held is not None:
            return with_quantization(self.held, self.model, self.quantization)
        self._check_has_weights()
        base = self.base or self.model
        if self.path is None:
            tensors: Mapping[str, LazyTensor] = random_checkpoint(base, self.seed)
        elif self.adapter is not None and self.adapter.folder == self.path:
            tensors, _ = open_with_lora(self.path, base)
        else:
            from lite_runner.weights.sharding.reshard import whole_tensors

            tensors = whole_tensors(self.path, base, self.strategy)
        if self.adapter is not None:
            tensors = merged(tensors, self.adapter, base)
        return with_quantization(tensors, self.model, self.quantization)

    def resharded(self, ranks: Ranks, *, vocab_parallel: bool) -> Mapping[str, LazyTensor]:
        """As `tensors`, whatever the layout of the checkpoint."""
        return dataclasses.replace(self, auto_trans=True).tensors(
            ranks, vocab_parallel=vocab_parallel
        )

    def verify(self, every: Sequence[Ranks], *, vocab_parallel: bool) -> ModelFiles:
        """The same files, once the shards that any of these ranks reads have been compared with
        their manifests; those that an adapter is merged into are compared by who reads them.

        Raises ArtifactError.
        """
        if self.path is None or self.adapter is not None:
            return self
        from lite_runner.weights.sharding.reshard import verify_shards

        verify_shards(
            self.path,
            self.model,
            every,
            strategy=self.strategy,
            vocab_parallel=vocab_parallel,
        )
        return dataclasses.replace(self, verified=True)

    def check_layout(self, ranks: Ranks, *, vocab_parallel: bool) -> None:
        """Raise ArtifactError where `tensors` would, but for what the bytes of shards are."""
        files = dataclasses.replace(self, verified=True)
        files.tensors(ranks, vocab_parallel=vocab_parallel)

    @property
    def is_here(self) -> bool:
        """Whether nothing of it has to be fetched."""
        return self.path is not None or self.exported is not None or self.source == RANDOM

    def location(self) -> str:
        """Where the weights are, and the size of the files that hold them, for people."""
        if self.exported is not None:
            return f"in the exported model {self.exported.folder}"
        if self.source == RANDOM:
            return RANDOM
        if not self.is_here:
            return f"{self.source}: would be fetched"
        return f"{self.source}: {readable(self.stored_bytes())} here"

    def stored_bytes(self) -> int:
        """Size of the files that hold the weights; 0 for random weights and files not here."""
        if self.path is None:
            return 0
        if self.path.is_file():
            return self.path.stat().st_size
        every = [item for item in self.path.rglob("*") if item.is_file()]
        sizes = [
            sum(item.stat().st_size for item in every if item.suffix in suffixes)
            for suffixes in WEIGHTS
        ]
        return sizes[0] or sizes[1]

    def _unrounded(self, ranks: Ranks, vocab_parallel: bool) -> Mapping[str, LazyTensor]:
        if self.held is not None:
            return with_quantization(self.held, self.model, self.quantization)
        self._check_has_weights()
        if self.path is None or self.adapter is not None or self.quantization.rounds:
            # Whole matrices are quantized, then sharded: all ranks get the same integers.
            return pieces(self.whole(), self.model, ranks, vocab_parallel=vocab_parallel)
        # Not for those who read no weights: it imports protobuf, for strategy files.
        from lite_runner.weights.sharding.reshard import tensors_for

        tensors = tensors_for(
            self.path,
            self.model,
            ranks,
            strategy=self.strategy,
            auto_trans=self.auto_trans,
            vocab_parallel=vocab_parallel,
            verified=self.verified,
        )
        return with_quantization(tensors, self.model, self.quantization)

    def _check_has_weights(self) -> None:
        if self.exported is not None:
            raise ArtifactError(
                f"{self.exported.folder}: an exported model, whose weights stay in it"
            )
        if self.quantization.rounds and self.path and rank_folders(self.path):
            raise ArtifactError(
                f"{self.path}: cut for several ranks, and quant={self.quantization} wants a whole "
                "checkpoint",
                "merge it first: run_mode=shard parallel=single",
            )
