"""The files of a model: where they are, what they hold, and their tensors, opened but not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from lite_runner.architectures.quantization import Quantization
from lite_runner.config.sections import RANDOM, Ranks
from lite_runner.errors import ArtifactError, NonFiniteError, RunnerError
from lite_runner.records import dataclass
from lite_runner.system.files import readable, sampled_digest
from lite_runner.weights.checkpoint import LEARNED_KEYS, LORA, PICKLES, open_with, rank_folders
from lite_runner.weights.formats.gguf_file import parts_of

# Tensor readers are imported by the methods that open them: a run from packed layers opens none.
if TYPE_CHECKING:
    from lite_runner.architectures.spec import Decoder
    from lite_runner.config.sections import DType
    from lite_runner.model.exported_model import ExportedModel
    from lite_runner.weights import LazyTensor
    from lite_runner.weights.formats.gguf_file import GGUFFile
    from lite_runner.weights.lora.adapter import Adapter

# Suffixes of weight files; the second are used if there are none of the first.
WEIGHTS = ((".safetensors", ".ckpt", ".gguf"), PICKLES)


@dataclass(frozen=True)
class ModelFiles:
    """A located model: its source, its description, and how its weights are to be read."""

    source: str  # as in the config; "random" for weights drawn from the seed
    path: Path | None  # None: random weights, an exported model, or not fetched
    model: Decoder
    seed: int  # of random weights
    exported: ExportedModel | None = None  # an exported model, which needs no checkpoint
    strategy: Path | None = None  # layout of a sharded checkpoint that has no manifests
    auto_trans: bool = False  # reshard a checkpoint with another layout
    verified: bool = False  # `verify` has been called, maybe by another process
    base: Decoder | None = None  # with an adapter: the model into which it is merged
    adapter: Adapter | None = None
    learned_keys: Mapping[str, LazyTensor] | None = None  # of the checkpoint: see learned_keys.py
    quantization: Quantization = Quantization()
    held: Mapping[str, LazyTensor] | None = None  # this rank's tensors, in memory; None: on disk
    stored: Literal["F32", "F16"] = "F32"  # type of weights that are not on this machine
    rounded: DType = "float32"  # wider matrices are rounded to it; integers stay
    # The opened GGUF, held so that its header is parsed once: see `gguf_at`.
    gguf: GGUFFile | None = field(default=None, compare=False, repr=False)

    @property
    def digest(self) -> str | None:
        """A hash of the checkpoint's files by samples of each; None: there are none."""
        if self.path is None:
            return None
        if self.path.is_file():
            return sampled_digest(parts_of(self.path) if self.gguf else [self.path])
        for suffixes in WEIGHTS:
            if paths := [one for one in self.path.rglob("*") if one.suffix in suffixes]:
                return sampled_digest(sorted(paths))
        return None

    @property
    def bfloat16_input(self) -> bool:
        """True if native kernels round the inputs of bfloat16 matrices to it."""
        return self.rounded == "bfloat16" and self.quantization.quant == "none"

    def tensors(
        self, ranks: Ranks | None = None, *, vocab_parallel: bool = True
    ) -> Mapping[str, LazyTensor]:
        """Every tensor, or one rank's shards, by MindFormers' names; checked but not read.

        Quantized matrices have their integers, in one rank; others are `rounded`. Raises
        ArtifactError.
        """
        from lite_runner.weights.quantization.quantize import with_matrices_in

        tensors = self._unrounded(ranks or Ranks(), vocab_parallel)
        quantized = self.quantization.rounds
        return tensors if quantized else with_matrices_in(tensors, self.rounded)

    def whole(self) -> Mapping[str, LazyTensor]:
        """Every tensor of the model: shards joined, the adapter merged. Raises ArtifactError."""
        if self.learned_keys is not None:
            raise ArtifactError(
                f"{self.source}: has learned keys (pet_config), which other formats cannot hold",
                "predict, chat and serve with backend=native compute them; without pet_config it is"
                " the base model",
            )
        return self._whole()

    def _whole(self) -> Mapping[str, LazyTensor]:
        from lite_runner.weights.lora.adapter import merged
        from lite_runner.weights.quantization.quantize import with_quantization

        if self.held is not None:
            return with_quantization(self.held, self.model, self.quantization)
        tensors = self.without_adapter()
        if self.adapter is not None:
            tensors = merged(tensors, self.adapter, self.base or self.model)
        return with_quantization(tensors, self.model, self.quantization)

    def without_adapter(self) -> Mapping[str, LazyTensor]:
        """Every tensor of the model that the adapter is merged into, as it is stored. Raises
        ArtifactError."""
        from lite_runner.weights.layouts import random_checkpoint

        self._check_has_weights()
        base = self.base or self.model
        if self.path is None:
            return random_checkpoint(base, self.seed, self.stored)
        if self.adapter is not None and self.adapter.folder == self.path:
            return open_with(LORA, self.path, base)[0]
        if self.learned_keys is not None:
            return open_with(LEARNED_KEYS, self.path, base)[0]
        from lite_runner.weights.sharding.shards import whole_tensors

        return whole_tensors(self.path, base, self.strategy)

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
        if self.path is None or self.adapter is not None or self.learned_keys is not None:
            return self
        from lite_runner.weights.sharding.shards import verify_shards

        verify_shards(
            self.path, self.model, every, strategy=self.strategy, vocab_parallel=vocab_parallel
        )
        return dataclasses.replace(self, verified=True)

    def check_layout(self, ranks: Ranks, *, vocab_parallel: bool) -> None:
        """Raise ArtifactError where `tensors` would, but for what the bytes of shards are."""
        files = dataclasses.replace(self, verified=True)
        files.tensors(ranks, vocab_parallel=vocab_parallel)

    @property
    def is_local(self) -> bool:
        """True if nothing has to be fetched."""
        return self.path is not None or self.exported is not None or self.source == RANDOM

    def location(self) -> str:
        """Location and size of the files of the weights, as text."""
        if self.exported is not None:
            return f"in the exported model {self.exported.folder}"
        if self.source == RANDOM:
            return RANDOM
        if not self.is_local:
            return f"{self.source}: would be fetched"
        return f"{self.source}: {readable(self.stored_bytes())} here"

    def stored_bytes(self) -> int:
        """Size of the files that hold the weights; 0 for random weights and files not here."""
        if self.path is None:
            return 0
        if self.path.is_file():
            return sum(part.stat().st_size for part in parts_of(self.path) if part.is_file())
        every = [item for item in self.path.rglob("*") if item.is_file()]
        sizes = [
            sum(item.stat().st_size for item in every if item.suffix in suffixes)
            for suffixes in WEIGHTS
        ]
        return sizes[0] or sizes[1]

    def _unrounded(self, ranks: Ranks, vocab_parallel: bool) -> Mapping[str, LazyTensor]:
        from lite_runner.weights.quantization.quantize import with_quantization
        from lite_runner.weights.sharding.partition import pieces

        if self.held is not None:
            return with_quantization(self.held, self.model, self.quantization)
        self._check_has_weights()
        changed = self.adapter is not None or self.learned_keys is not None
        if self.path is None or changed or self.quantization.rounds:
            # Quantized before sharding, so that all ranks get the same integers.
            return pieces(self._whole(), self.model, ranks, vocab_parallel=vocab_parallel)
        # Imported here: it imports protobuf, for strategy files.
        from lite_runner.weights.sharding.shards import tensors_for

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
                f"{self.path}: sharded for several ranks, and quant={self.quantization} needs a"
                " whole checkpoint",
                "merge it first: run_mode=shard parallel=single",
            )


@contextmanager
def explained_nonfinite(files: ModelFiles, ranks: Ranks | None = None) -> Iterator[None]:
    """Add to a NonFiniteError the first of the model's weights that is not finite, which names its
    layer, or that all of them are: then it is the computation that overflows."""
    try:
        yield
    except NonFiniteError as error:
        if files.exported is not None:  # an export, whose weights are inside its graphs
            raise
        try:
            name = _first_nonfinite(files, ranks)
        except RunnerError:
            raise error from None
        if name is None:
            cause, hint = "all weights are finite, so the computation overflows", error.hint
        else:
            cause, hint = f"{name} of the checkpoint is not finite", "fetch or convert it again"
        raise NonFiniteError(f"{error.message}: {cause}", hint) from error


def _first_nonfinite(files: ModelFiles, ranks: Ranks | None) -> str | None:
    from lite_runner.weights import CHUNK, widened

    for name, tensor in files.tensors(ranks).items():
        if not all(np.isfinite(widened(chunk)).all() for chunk in tensor.chunks(CHUNK)):
            return name
    return None
