"""The seat that each backend folder defines: unsupported runs, memory estimate, opening it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Backend
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.parallel import Ranks
from lite_runner.config.schema import BACKENDS
from lite_runner.config.sections import ComputeSettings
from lite_runner.model import ModelFiles
from lite_runner.native.structs import LoraSize, pool_size
from lite_runner.records import dataclass
from lite_runner.sizing import Memory
from lite_runner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lite_runner.model.adapters import AdapterJob
    from lite_runner.weights.lora.adapter import Adapter


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run for a backend, besides the model."""

    settings: ComputeSettings
    device: str  # "CPU" or "Ascend"
    slots: int  # rows computed together
    length: int  # tokens of a row, prompt and generated
    ranks: Ranks = Ranks()
    width: int = 1  # rows of one prompt: its beams, or its texts
    generation: Sequence[GenerationConfig] = ()  # of each prompt
    prompts: Sequence[Sequence[int]] = ()  # their token ids
    prompt_logits: bool = False  # logits of every prompt token are needed, not only of the last
    adapters: AdapterJob | None = None  # None: the base model alone
    tokenizer: Tokenizer | None = None  # None: the checkpoint has none, or nobody opened it yet
    folder: Path | None = None  # of the run, for files of an engine
    draft: ModelFiles | None = None  # a smaller model, which drafts tokens
    is_draft: bool = False
    cache_bytes: int | None = None  # limit of the KV cache; None: its full size

    @property
    def speculates(self) -> str:
        """The setting by which tokens are drafted without a draft model; "": none are. Never in
        run modes that score texts."""
        given = self.settings.speculate
        return "" if given == "none" or self.is_draft else f"speculate={given}"

    def of_draft(self, draft: ModelFiles) -> RunOptions:
        """The options of the draft model of this run."""
        length = min(self.length, draft.model.seq_length)
        return replace(self, length=length, draft=None, adapters=None, is_draft=True)

    @property
    def predicts_next(self) -> bool:
        """True if the layer of the model that predicts a further token drafts."""
        return self.settings.speculate == "mtp" and not self.is_draft

    @property
    def stores_prefixes(self) -> bool:
        """True if prefixes of prompts are stored in files."""
        return not self.is_draft and self.settings.prefix_cache == "disk"

    @property
    def local_ranks(self) -> int:
        """Ranks on this machine."""
        return self.settings.parallel.local_worker_num or self.ranks.size

    @property
    def adapter_slots(self) -> int:
        """Adapters to keep loaded on the device; by default as many as can run in one batch."""
        if self.adapters is None or self.settings.adapter_dtype is None:
            return 0
        most = self.settings.max_loaded_adapters or max(1, self.slots // self.width)
        return most if self.adapters.later_rank else min(most, len(self.adapters.adapters))

    def adapter_bytes(self, model: Decoder) -> int:
        """Bytes of this rank's adapter pool on its device."""
        settings = self.settings
        if self.adapters is None or settings.adapter_dtype is None:
            return 0
        rounded = settings.adapter_dtype == "bf16"
        dtype = "bfloat16" if rounded else settings.precision.computed(self.device)
        return self.adapters.pool_bytes(model, self.ranks, self.adapter_slots, dtype)

    def rank_adapters(self, model: Decoder) -> tuple[Sequence[Adapter], LoraSize | None]:
        """This rank's shards of the adapters, and the size of their slots; None: the base model
        alone. Raises ArtifactError."""
        if self.adapters is None or self.settings.adapter_dtype is None:
            return (), None
        later = self.adapters.later_rank
        if not (adapters := self.adapters.of_rank(model, self.ranks)) and not later:
            return (), None
        later_targets = []
        if later:
            from lite_runner.weights.lora.adapter import linear_sites

            later_targets = [site.weight for site in linear_sites(model)]
        size = pool_size(
            adapters,
            self.adapter_slots,
            rounded=self.settings.adapter_dtype == "bf16",
            later_rank=later,
            later_targets=later_targets,
        )
        return adapters, size


class Seat(Protocol):
    """A backend's entry point for runs. The package of its folder has one as SEAT."""

    # Its memory is checked first, and rows and lengths may be reduced to what fits.
    elastic: bool = False
    # Capabilities of only some backends: the same bits on every processor, hidden states for
    # embeddings.
    reproducible: bool = False
    hidden_states: bool = False

    def unsupported(self, files: ModelFiles, options: RunOptions) -> list[str]:
        """Reasons why it cannot compute a run, each with a remedy; empty: it can."""
        ...

    def memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        """Memory of one rank, estimated from sizes: on CPU of its process, else on its device."""
        ...

    def describe(self, files: ModelFiles, options: RunOptions) -> str:
        """Description of the engine, for people."""
        ...

    def dtype(self, files: ModelFiles, options: RunOptions) -> str:
        """The type of the weights in memory, or their quantization, for people."""
        ...

    def check(self, files: ModelFiles, options: RunOptions) -> None:
        """Note, before anything is started, what the results depend on. Raises ConfigError for what
        cannot be computed, and, but in a dry run, EnvironmentFault for what is not installed."""
        return

    def details(self, files: ModelFiles, options: RunOptions) -> tuple[str, ...]:
        """Further lines of dry_run=true."""
        return ()

    def provenance(self) -> dict[str, str]:
        """Versions that the bits of a result depend on, besides the weights and the processor."""
        return {}

    def profiled(self, folder: Path) -> AbstractContextManager[None]:
        """The context of a run with profile=true; files of a profiler of its own go to a folder."""
        return nullcontext()

    def open(self, files: ModelFiles, options: RunOptions) -> Backend:
        """The backend with its weights. Several ranks must have joined. Raises RunnerError."""
        ...


def seat(name: str) -> Seat:
    """The seat of a backend by the name that backend= takes."""
    return cast(Seat, import_module(f"lite_runner.backends.{BACKENDS[name]}").SEAT)
