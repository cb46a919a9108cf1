"""The adapters of a run: which prompt wants which, opened and checked before the base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.config.cluster import ranks_of
from lite_runner.config.options import ComputeOptions, GenerateOptions
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import DType, RunConfig
from lite_runner.model.files import ModelFiles
from lite_runner.model.merged_adapter import adapters_of
from lite_runner.sizing.need import BYTES_OF
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.lora.adapter_listing import is_sharded
from lite_runner.weights.lora.adapter_pieces import adapter_pieces
from lite_runner.weights.lora.adapter_shards import cached_shards, open_shards

# Below output_dir, not in the run's own folder: the next run finds them.
CUT_FOLDER = Path("transformed_checkpoint", "slora")


@dataclass(frozen=True)
class AdapterJob:
    """Every adapter that a prompt wants, in the order of their first prompts."""

    adapters: Sequence[Adapter]
    of_prompts: Sequence[str | None]  # their names; None: the base model
    cut: Path | None = None  # where an earlier run left their pieces; these are the first rank's

    def name(self, prompt: int) -> str | None:
        """Of a prompt's adapter; None: the base model."""
        return self.of_prompts[prompt]

    def share(self, first: int, end: int) -> AdapterJob:
        """The same for some of the prompts."""
        return replace(self, of_prompts=self.of_prompts[first:end])


def open_wanted(
    config: GenerateOptions, model: Decoder, names: Sequence[str | None]
) -> AdapterJob | None:
    """The adapters that prompts want by name (None: the base model); None where the run has none.

    Only headers are read. Raises ArtifactError, for an unknown name with a suggestion.
    """
    if not config.adapter_path or config.merges_adapter:
        return None
    wanted = list(dict.fromkeys(name for name in names if name is not None))
    path = Path(config.adapter_path).expanduser()
    cut = path if is_sharded(path) else None
    if cut is not None:  # those of the first rank stand for all
        ranks, vocab_parallel = replace(ranks_of(config), rank=0), config.vocab_parallel
        opened = open_shards(path, model, ranks, wanted, vocab_parallel=vocab_parallel)
    else:
        opened = list(adapters_of(config, model, wanted).values())
    return AdapterJob(opened, names, cut)


def check_values(job: AdapterJob, files: ModelFiles) -> None:
    """ArtifactError for an adapter that changes nothing, or that is of another base."""
    if job.cut is None:  # or they were checked before they were cut
        check_adapters(job.adapters, files)


def check_adapters(adapters: Sequence[Adapter], files: ModelFiles) -> None:
    """ArtifactError for one that changes nothing, or that is of another base."""
    for adapter in adapters:
        adapter.check_effective()
    copied = [adapter for adapter in adapters if adapter.copies]
    if copied:
        base = files.whole()
        for adapter in copied:
            adapter.check_copies(base)


def pieces_of(
    job: AdapterJob, config: ComputeOptions, model: Decoder, ranks: Ranks
) -> list[Adapter]:
    """What this rank holds of each adapter: read already cut, cut now, or, with auto_trans_ckpt,
    cut once for this and later runs."""
    vocab_parallel = config.vocab_parallel
    if job.cut is not None:
        names = [one.name for one in job.adapters]
        return open_shards(job.cut, model, ranks, names, vocab_parallel=vocab_parallel)
    if config.auto_trans_ckpt and ranks.tensor > 1:
        folder = Path(config.output_dir).expanduser() / CUT_FOLDER
        return cached_shards(job.adapters, model, ranks, folder, vocab_parallel=vocab_parallel)
    return _cut_now(job, config, model, ranks)


def pool_bytes(
    job: AdapterJob, config: RunConfig, model: Decoder, ranks: Ranks, slots: int, dtype: DType
) -> int:
    """Bytes of as many adapter slots in each of `ranks`, each with room for the largest r.

    Only shapes are looked at, of which all ranks have the same.
    """
    pieces = job.adapters if job.cut is not None else _cut_now(job, config, model, ranks)
    pairs = [item for adapter in pieces for item in adapter.pairs.items()]
    widths = {name: pair.a.shape[1] + pair.b.shape[0] for name, pair in pairs}
    largest = max((pair.rank for _, pair in pairs), default=0)
    return slots * largest * sum(widths.values()) * BYTES_OF[dtype]


def _cut_now(job: AdapterJob, config: RunConfig, model: Decoder, ranks: Ranks) -> list[Adapter]:
    """What `ranks` holds of adapters that are whole; nothing is read."""
    return [
        adapter_pieces(adapter, model, ranks, vocab_parallel=config.vocab_parallel)
        for adapter in job.adapters
    ]
