"""The adapters of a run: which request uses which, validated before the base model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.config.cluster import ranks_of
from lite_runner.config.options import AdapterOptions, ComputeOptions, GenerateOptions
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import DType, RunConfig
from lite_runner.model.files import ModelFiles
from lite_runner.model.merged_adapter import adapter_root_of, adapters_of
from lite_runner.records import dataclass
from lite_runner.sizing.need import BYTES_OF
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.lora.adapter_listing import is_sharded
from lite_runner.weights.lora.adapter_pieces import adapter_pieces
from lite_runner.weights.lora.adapter_shards import cached_shards, open_shards

# Below output_dir, not in the run's own folder: the next run finds them.
SHARDED_FOLDER = Path("transformed_checkpoint", "slora")


@dataclass(frozen=True)
class AdapterJob:
    """The adapters that prompts use, in the order of their first use."""

    adapters: Sequence[Adapter]
    of_prompts: Sequence[str | None]  # adapter name of each prompt; None: the base model
    sharded: Path | None = None  # folder of adapters stored as shards; `adapters` are rank 0's
    root: Path | None = None  # that they must lie in; None: anywhere

    def name(self, prompt: int) -> str | None:
        """The adapter of a prompt; None: the base model."""
        return self.of_prompts[prompt]

    def share(self, first: int, end: int) -> AdapterJob:
        """The same adapters, for the prompts `first` to `end`."""
        return replace(self, of_prompts=self.of_prompts[first:end])


def open_adapter_job(
    config: GenerateOptions, model: Decoder, names: Sequence[str | None]
) -> AdapterJob | None:
    """Open the adapters that prompts name (None: the base model); None for a run without adapters.

    Only headers are read. Raises ArtifactError; that for an unknown name has a suggestion.
    """
    if not config.adapter_path or config.merges_adapter:
        return None
    wanted = list(dict.fromkeys(name for name in names if name is not None))
    path = Path(config.adapter_path).expanduser()
    sharded, root = path if is_sharded(path) else None, adapter_root_of(config)
    if sharded is not None:  # all ranks have the same shapes
        ranks, vocab_parallel = replace(ranks_of(config), rank=0), config.vocab_parallel
        opened = open_shards(path, model, ranks, wanted, vocab_parallel=vocab_parallel, root=root)
    else:
        opened = list(adapters_of(config, model, wanted).values())
    return AdapterJob(opened, names, sharded, root)


def all_adapters(config: AdapterOptions, model: Decoder) -> AdapterJob | None:
    """Open every adapter of adapter_path, for prompts that come later; None without adapters.
    Raises ArtifactError."""
    if not config.adapter_path:
        return None
    opened = list(adapters_of(config, model).values())
    return AdapterJob(opened, (), root=adapter_root_of(config))


def check_adapter_job(job: AdapterJob, files: ModelFiles) -> None:
    """As `check_adapters`, unless the adapters were checked before they were sharded."""
    if job.sharded is None:
        check_adapters(job.adapters, files)


def check_adapters(adapters: Sequence[Adapter], files: ModelFiles) -> None:
    """Raise ArtifactError for an adapter without effect, or with tensors of another base model."""
    for adapter in adapters:
        adapter.check_effective()
    copied = [adapter for adapter in adapters if adapter.copies]
    if copied:
        base = files.whole()
        for adapter in copied:
            adapter.check_copies(base)


def rank_adapters(
    job: AdapterJob, config: ComputeOptions, model: Decoder, ranks: Ranks
) -> list[Adapter]:
    """This rank's shards of each adapter: read from disk, sharded now, or, with auto_trans_ckpt,
    sharded and stored for later runs."""
    vocab_parallel = config.vocab_parallel
    if job.sharded is not None:
        names = [one.name for one in job.adapters]
        return open_shards(
            job.sharded, model, ranks, names, vocab_parallel=vocab_parallel, root=job.root
        )
    if config.auto_trans_ckpt and ranks.tensor > 1:
        folder = Path(config.output_dir).expanduser() / SHARDED_FOLDER
        return cached_shards(job.adapters, model, ranks, folder, vocab_parallel=vocab_parallel)
    return _shard(job, config, model, ranks)


def pool_bytes(
    job: AdapterJob, config: RunConfig, model: Decoder, ranks: Ranks, slots: int, dtype: DType
) -> int:
    """Bytes of `slots` adapter slots on each rank, all of the largest rank r.

    Only shapes are read; they are the same on all ranks.
    """
    pieces = job.adapters if job.sharded is not None else _shard(job, config, model, ranks)
    pairs = [item for adapter in pieces for item in adapter.pairs.items()]
    widths = {name: pair.a.shape[1] + pair.b.shape[0] for name, pair in pairs}
    largest = max((pair.rank for _, pair in pairs), default=0)
    return slots * largest * sum(widths.values()) * BYTES_OF[dtype]


def _shard(job: AdapterJob, config: RunConfig, model: Decoder, ranks: Ranks) -> list[Adapter]:
    """The shards of whole adapters that `ranks` holds; no values are read."""
    return [
        adapter_pieces(adapter, model, ranks, vocab_parallel=config.vocab_parallel)
        for adapter in job.adapters
    ]
