"""LoRA adapters of a run: the ones it names, loaded beside the model or merged into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lite_runner.architectures.settings import PetLoraSettings
from lite_runner.architectures.spec import Decoder
from lite_runner.config.prompts import adapter_names
from lite_runner.config.sections import LORA_NAME, AdapterSource, DType, Ranks
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.records import dataclass
from lite_runner.sizing import BYTES_OF
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import LORA, open_with
from lite_runner.weights.lora.adapter import (
    HEAD,
    Adapter,
    LoraPair,
    by_module,
    linear_sites,
    merged,
    merged_model,
)
from lite_runner.weights.lora.adapter_config import NAMES, lora_settings
from lite_runner.weights.lora.adapter_reader import (
    FILES,
    adapter_folders,
    fitted,
    is_listing,
    open_adapter,
    open_adapters,
    shards_of,
)
from lite_runner.weights.lora.adapter_shards import adapter_pieces, cached_shards, open_shards
from lite_runner.weights.sharding.partition import pieces
from lite_runner.weights.source import fetch, is_on_hub

# Name, modification time in ns, bytes and inode of each file.
AdapterFiles: TypeAlias = tuple[tuple[str, int, int, int], ...]


def adapters_of(
    asked: AdapterSource, model: Decoder, names: Sequence[str] | None = None
) -> dict[str, Adapter]:
    """The adapters of adapter_path with these `names`; without `names` those of adapter_id, or all
    where it is null. Raises ArtifactError."""
    if names is None and asked.ids is not None:
        names = adapter_names(asked.ids)
    return open_adapters(adapter_place(asked.path), model, names, root=adapter_root_of(asked))


def only_adapter(asked: AdapterSource) -> str | None:
    """The name of the only adapter of adapter_path; None where there are several, or adapter_id
    names some. Raises ArtifactError."""
    if not asked.path or asked.ids is not None or asked.in_weights:
        return None
    path = adapter_place(asked.path)
    if not is_listing(path) and shards_of(path):
        return None
    listed = adapter_folders(path, adapter_root_of(asked))
    return next(iter(listed)) if len(listed) == 1 else None


@cache
def adapter_place(path: str) -> Path:
    """The folder or list that adapter_path names; a repository is downloaded, once a process.
    Raises ArtifactError."""
    return fetch(path, "adapter_path") if is_on_hub(path) else Path(path).expanduser()


def adapter_root_of(asked: AdapterSource) -> Path | None:
    """The folder that adapters must lie in; None: anywhere."""
    return Path(asked.root).expanduser() if asked.root else None


def with_adapter(files: ModelFiles, asked: AdapterSource) -> ModelFiles:
    """The model with the adapter of adapter_path merged into it, if one is named.

    Raises ConfigError where adapter_path has several and adapter_id names none of them,
    ArtifactError where the adapter does not fit the model.
    """
    if not asked.path or files.adapter is not None:
        return files
    adapters = adapters_of(asked, files.model)
    if len(adapters) != 1:
        raise ConfigError(
            f"adapter_path={asked.path} lists {len(adapters)} adapters, one can be merged",
            f"adapter_id={next(iter(adapters))}",
        )
    (adapter,) = adapters.values()
    return _merged(files, adapter)


def with_pet_lora(
    files: ModelFiles, pet: PetLoraSettings, asked: AdapterSource | None
) -> ModelFiles:
    """Of a run with pet_type=lora, the adapter merged: that of adapter_path, or the checkpoint's
    own; zeros where the weights are random, for a script to load others into.

    Raises ArtifactError where there is none, or it does not fit the model.
    """
    path = files.path
    if asked is not None and asked.path:
        return with_adapter(files, asked)
    if path is None:
        return _merged(files, _zeros(pet, files.model))
    _, lora = open_with(LORA, path, files.model)
    if not lora:
        raise ArtifactError(
            f"{path}: pet_config.pet_type=lora, but the checkpoint holds no LoRA weights (names "
            "that end in lora_a and lora_b)",
            "adapter_path= the adapter's folder, or leave pet_config out for the base model",
        )
    settings = lora_settings(path, pet.lora_rank, pet.lora_alpha, pet.target_modules)
    adapter = fitted("lora", path, lora, path, settings, files.model)
    return _merged(files, adapter)


def network_tensors(
    files: ModelFiles, ranks: Ranks, *, vocab_parallel: bool
) -> dict[str, LazyTensor]:
    """The tensors of `ranks` of a network with an adapter in it: the base's, A and B, by
    MindFormers' names. Raises ArtifactError."""
    base, adapter = files.base, files.adapter
    assert base is not None and adapter is not None
    found = pieces(files.without_adapter(), base, ranks, vocab_parallel=vocab_parallel)
    own = adapter_pieces(adapter, base, ranks, vocab_parallel=vocab_parallel)
    for weight, pair in own.pairs.items():
        name_a, name_b = _names(weight)
        found |= {name_a: pair.a, name_b: pair.b}
    return found


def merged_network(files: ModelFiles, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of the model from `network_tensors`, whose values may be others now."""
    base, adapter = files.base, files.adapter
    assert base is not None and adapter is not None
    rest, pairs = dict(tensors), {}
    for weight, pair in adapter.pairs.items():
        name_a, name_b = _names(weight)
        pairs[weight] = LoraPair(rest.pop(name_a), rest.pop(name_b), pair.scale)
    own = replace(adapter, pairs=pairs, copies={}, may_be_zero=True)
    return merged(rest, own, base)


def _names(weight: str) -> tuple[str, str]:
    start = f"{weight.rpartition('.')[0]}.{LORA_NAME}"
    return f"{start}a", f"{start}b"


def _zeros(pet: PetLoraSettings, model: Decoder) -> Adapter:
    """The adapter of a network that nothing is loaded into. Raises ArtifactError where the model
    has no such modules."""
    where = Path("pet_config")
    settings = lora_settings(where, pet.lora_rank, pet.lora_alpha, pet.target_modules)
    modules = by_module(model, hugging_face=False)
    targets = settings.targets(modules, HEAD)
    pairs = {
        site.weight: LoraPair(
            _zero(pet.lora_rank, site.width_in),
            _zero(site.width_out, pet.lora_rank),
            settings.scale(module),
        )
        for module, places in modules.items()
        if module in targets
        for site in places
    }
    return Adapter("lora", where, pairs, may_be_zero=True)


def _zero(*shape: int) -> LazyTensor:
    return LazyTensor(shape, "F32", lambda: np.zeros(shape, np.float32))


def _merged(files: ModelFiles, adapter: Adapter) -> ModelFiles:
    model = merged_model(files.model, adapter)
    return replace(files, model=model, base=files.model, adapter=adapter)


# Below output_dir, not in the run's own folder: the next run finds them.
SHARDED_FOLDER = Path("transformed_checkpoint", "slora")


@dataclass(frozen=True)
class AdapterJob:
    """The adapters that prompts use, in the order of their first use."""

    adapters: Sequence[Adapter]
    of_prompts: Sequence[str | None]  # adapter name of each prompt; None: the base model
    sharded: Path | None = None  # folder of adapters stored as shards; `adapters` are rank 0's
    root: Path | None = None  # the folder that they must lie in; None: anywhere
    vocab_parallel: bool = False  # ranks hold parts of the embedding and the head
    stored: Path | None = None  # folder where shards are kept for later runs; None: they are not
    later_rank: int = 0  # see AdapterSource

    def name(self, prompt: int) -> str | None:
        """The adapter of a prompt; None: the base model."""
        return self.of_prompts[prompt]

    def share(self, first: int, end: int) -> AdapterJob:
        """The same adapters, for the prompts `first` to `end`."""
        return replace(self, of_prompts=self.of_prompts[first:end])

    def check(self, files: ModelFiles) -> None:
        """As `check_adapters`, unless the adapters were checked before they were sharded."""
        if self.sharded is None:
            check_adapters(self.adapters, files)

    def of_rank(self, model: Decoder, ranks: Ranks) -> list[Adapter]:
        """This rank's shards of each adapter: read from disk, sharded now, or sharded and stored.
        Raises ArtifactError."""
        wide = self.vocab_parallel
        if self.sharded is not None:
            names = [one.name for one in self.adapters]
            return open_shards(
                self.sharded, model, ranks, names, vocab_parallel=wide, root=self.root
            )
        if self.stored is not None and ranks.tensor > 1:
            return cached_shards(self.adapters, model, ranks, self.stored, vocab_parallel=wide)
        return self._shard(model, ranks)

    def pool_bytes(self, model: Decoder, ranks: Ranks, slots: int, dtype: DType) -> int:
        """Bytes of `slots` adapter slots on each rank, all of the largest rank r.

        Only shapes are read; they are the same on all ranks.
        """
        pieces = self.adapters if self.sharded is not None else self._shard(model, ranks)
        pairs = [item for adapter in pieces for item in adapter.pairs.items()]
        widths = {name: pair.a.shape[1] + pair.b.shape[0] for name, pair in pairs}
        if self.later_rank:
            widths |= {one.weight: one.width_in + one.width_out for one in linear_sites(model)}
        largest = max((pair.rank for _, pair in pairs), default=0)
        largest = max(largest, self.later_rank)
        return slots * largest * sum(widths.values()) * BYTES_OF[dtype]

    def _shard(self, model: Decoder, ranks: Ranks) -> list[Adapter]:
        """The shards of whole adapters that `ranks` holds; no values are read."""
        return [
            adapter_pieces(adapter, model, ranks, vocab_parallel=self.vocab_parallel)
            for adapter in self.adapters
        ]


def adapter_job(
    asked: AdapterSource,
    adapters: Sequence[Adapter],
    names: Sequence[str | None] = (),
    sharded: Path | None = None,
) -> AdapterJob:
    """Opened adapters as a run wants them on ranks."""
    return AdapterJob(
        adapters,
        names,
        sharded,
        root=adapter_root_of(asked),
        vocab_parallel=asked.vocab_parallel,
        stored=Path(asked.store).expanduser() / SHARDED_FOLDER if asked.store else None,
        later_rank=asked.later_rank,
    )


def open_adapter_job(
    asked: AdapterSource, model: Decoder, ranks: Ranks, names: Sequence[str | None]
) -> AdapterJob | None:
    """Open the adapters that prompts name (None: the base model); None for a run without adapters.

    Only headers are read. Raises ArtifactError; that for an unknown name has a suggestion.
    """
    if not asked.path or asked.in_weights:
        return None
    wanted = list(dict.fromkeys(name for name in names if name is not None))
    path, root = adapter_place(asked.path), adapter_root_of(asked)
    sharded = shards_of(path, root)
    if sharded is None:
        return adapter_job(asked, list(adapters_of(asked, model, wanted).values()), names)
    first = replace(ranks, rank=0)  # all ranks have the same shapes
    opened = open_shards(
        sharded, model, first, wanted, vocab_parallel=asked.vocab_parallel, root=root
    )
    return adapter_job(asked, opened, names, sharded)


def all_adapters(asked: AdapterSource, model: Decoder) -> AdapterJob | None:
    """Open every adapter of adapter_path, for prompts that come later; None without adapters.
    Raises ArtifactError."""
    if not asked.path:
        return adapter_job(asked, []) if asked.later_rank else None
    return adapter_job(asked, list(adapters_of(asked, model).values()))


def check_adapters(adapters: Sequence[Adapter], files: ModelFiles) -> None:
    """Raise ArtifactError for an adapter without effect, or with tensors of another base model."""
    for adapter in adapters:
        adapter.check_effective()
    copied = [adapter for adapter in adapters if adapter.copies]
    if copied:
        base = files.whole()
        for adapter in copied:
            adapter.check_copies(base)


def adapter_files(folder: Path) -> AdapterFiles | None:
    """The current state of an adapter's files; None: some are missing."""
    found = []
    for name in FILES:
        with suppress(OSError):
            stat = (folder / name).stat()
            found.append((name, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    there = {one[0] for one in found}
    return tuple(found) if there & {*NAMES} and there - {*NAMES} else None


def in_memory(adapter: Adapter) -> Adapter:
    """An adapter that no longer depends on its files."""
    pairs = {
        weight: LoraPair(_held(pair.a), _held(pair.b), pair.scale)
        for weight, pair in adapter.pairs.items()
    }
    return replace(adapter, pairs=pairs, copies={})


def _held(tensor: LazyTensor) -> LazyTensor:
    values = tensor.read().copy()
    return LazyTensor(tensor.shape, tensor.dtype, lambda: values)


def open_later(
    asked: AdapterSource, files: ModelFiles, name: str, folder: str, root: Path
) -> Adapter:
    """The adapter of a folder below `root`, as a backend of one rank takes it.

    Raises ArtifactError as `open_adapters`.
    """
    opened = open_adapter(name, folder, files.model, root)
    check_adapters([opened], files)
    (adapter,) = adapter_job(asked, [opened]).of_rank(files.model, Ranks())
    return adapter
