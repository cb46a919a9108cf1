"""Checkpoints sharded for many ranks: opened, verified, assembled, resharded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.user_cache import digest_of
from lite_runner.weights import Index, LazyTensor, drop_pages, same_values
from lite_runner.weights.checkpoint import is_not_weight, open_checkpoint, rank_folders
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.hugging_face import check_tied_head
from lite_runner.weights.formats.mindformers import canonical_name
from lite_runner.weights.formats.safetensors_file import open_safetensors
from lite_runner.weights.layouts import check_tensors, expected_tensors
from lite_runner.weights.sharding.partition import Layout, Strategy, pieces, strategy_of
from lite_runner.weights.sharding.shard_manifest import ShardManifest, read_shard_manifest
from lite_runner.weights.sharding.strategy import read_strategy

HASH_THREADS = 4
COPY_AGAIN = "copy the whole set again, or shard the checkpoint again (run_mode=shard)"
MOST_COMPARED = 1 << 20  # bytes; larger replicated tensors are not compared between ranks
MOST_PARTS = 128  # tensor-parallel degrees tried when matching shapes
_SUFFIXES = (".ckpt", ".safetensors")


def whole_tensors(
    source: Path, model: Decoder, strategy: Path | None = None
) -> Mapping[str, LazyTensor]:
    """Every tensor of a full or sharded checkpoint; shards are verified against their manifests.

    `strategy`: the strategy file of a sharded one without manifests. Raises ArtifactError.
    """
    if not rank_folders(source):
        return _open_whole(source, model, strategy)
    shards = open_shards(source, model, strategy)
    shards.verify(range(len(shards.files)))
    return shards.whole()


def tensors_for(
    source: Path,
    model: Decoder,
    ranks: Ranks,
    *,
    strategy: Path | None = None,
    auto_trans: bool = False,
    vocab_parallel: bool = True,
    verified: bool = False,
) -> Mapping[str, LazyTensor]:
    """This rank's shards of the tensors of `source`, sharded when they are read.

    A full checkpoint is sharded for any ranks. A sharded one with the same layout is read as it is,
    also where its vocabulary alone is cut otherwise; with another layout only if `auto_trans`.
    Nothing is written. Only the shards that this rank
    needs are verified against their manifests, unless `verify_shards` has done so (`verified`).
    Raises ArtifactError.
    """
    if not rank_folders(source):
        whole = _open_whole(source, model, strategy)
        return pieces(whole, model, ranks, vocab_parallel=vocab_parallel)
    shards = open_shards(source, model, strategy)
    target = strategy_of(model, ranks, vocab_parallel=vocab_parallel)
    own = shards.rank_with(target, ranks.rank)
    if own is not None:
        if not verified:
            shards.verify([own])
        return {name: shards.held[own][name] for name in shards.shapes}
    same_ranks = strategy_of(model, ranks, vocab_parallel=not vocab_parallel)
    if not auto_trans and shards.rank_with(same_ranks, ranks.rank) is None:
        raise ArtifactError(
            f"{source}: sharded for {shards.describe()} (as {shards.layout_source} says), this"
            f" run needs tp={ranks.tensor} dp={ranks.data}",
            "auto_trans_ckpt=true reshards it while it is read; run_mode=shard writes other shards",
        )
    if not verified:
        shards.verify(shards.needed_for(target, ranks.rank))
    return pieces(shards.whole(), model, ranks, vocab_parallel=vocab_parallel)


def verify_shards(
    source: Path,
    model: Decoder,
    every: Sequence[Ranks],
    *,
    strategy: Path | None = None,
    vocab_parallel: bool = True,
) -> None:
    """Verify the shards that any of the ranks `every` needs of `source`, each once, against their
    manifests; of a full checkpoint nothing. Raises ArtifactError."""
    if not rank_folders(source):
        return
    shards, needed = open_shards(source, model, strategy), set()
    for ranks in every:
        target = strategy_of(model, ranks, vocab_parallel=vocab_parallel)
        own = shards.rank_with(target, ranks.rank)
        needed |= {own} if own is not None else shards.needed_for(target, ranks.rank)
    shards.verify(needed)


def _open_whole(source: Path, model: Decoder, strategy: Path | None) -> dict[str, LazyTensor]:
    if strategy is not None and source.exists():
        raise ArtifactError(
            f"{source}: a whole checkpoint, and {strategy} describes shards",
            "leave out src_strategy_path_or_dir, or give load_checkpoint= the folder of rank_*",
        )
    return open_checkpoint(source, model)


def open_shards(folder: Path, model: Decoder | None, strategy: Path | None = None) -> ShardSet:
    """The sharded checkpoint in `folder`, of which only the headers are read.

    Its layout is that of the manifests that run_mode=shard writes, else of the strategy file or
    folder `strategy`, else inferred from shapes. Without a `model` the tensors are those of the
    shards. Raises ArtifactError if ranks are missing, belong to different sets, or do not match
    that layout of `model`.
    """
    folders = _complete(folder)
    manifests = _manifests(folder, folders)
    files = tuple(
        path / manifests[rank].file if manifests else last_checkpoint(path)
        for rank, path in enumerate(folders)
    )
    if len({file.suffix for file in files}) > 1:
        other = next(file for file in files if file.suffix != files[0].suffix)
        raise ArtifactError(
            f"{folder}: of mixed formats: {files[0]} and {other}",
            "keep the checkpoints of one format in the rank_* folders",
        )
    if model is None and manifests:
        model = manifests[0].decoder()
    held = tuple(open_shard(file, model) for file in files)
    if model is None:
        layouts, shapes = strategy_in_file(folder, held, strategy)
        layout_source = f"the strategy {strategy}"
    else:
        shapes = expected_tensors(model)
        layouts, layout_source = find_layouts(folder, model, held, manifests, strategy)
    found = ShardSet(folder, files, held, layouts, shapes, manifests, layout_source)
    _check_shapes(found)
    _check_one_set(found)
    return found


@dataclass(frozen=True)
class ShardSet:
    """A complete sharded checkpoint whose shapes are validated."""

    folder: Path
    files: tuple[Path, ...]  # of each rank
    held: tuple[Mapping[str, LazyTensor], ...]  # of each rank, in the model's names
    strategy: Strategy
    shapes: Mapping[str, tuple[int, ...]]  # of the full tensors
    manifests: tuple[ShardManifest, ...]  # none, or one a rank
    layout_source: str  # source of the layout, for messages

    def whole(self) -> dict[str, LazyTensor]:
        """Every tensor of the model, assembled from its shards when it is read."""
        return {
            name: _assembled(
                shape, [(bounds, self.held[rank][name]) for bounds, rank in self._owners(name)]
            )
            for name, shape in self.shapes.items()
        }

    def rank_with(self, target: Strategy, rank: int) -> int | None:
        """The rank that holds exactly the shards of `rank` in `target`; None if there is none."""
        if self.strategy.stages > 1:
            return None
        for own in range(len(self.files)):
            if all(
                self.strategy.layouts[name].bounds(shape, own)
                == target.layouts[name].bounds(shape, rank)
                for name, shape in self.shapes.items()
            ):
                return own
        return None

    def needed_for(self, target: Strategy, rank: int) -> set[int]:
        """The ranks whose shards overlap those of `rank` in `target`."""
        return {
            own
            for name, shape in self.shapes.items()
            for bounds, own in self._owners(name)
            if _overlap(bounds, target.layouts[name].bounds(shape, rank)) is not None
        }

    def verify(self, ranks: Iterable[int]) -> None:
        """Verify the shards of `ranks` against their manifests. Raises ArtifactError."""
        if not self.manifests:
            return
        some = sorted(ranks)
        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="sha256") as pool:
            for rank, found in zip(
                some, pool.map(lambda rank: digest_of(self.files[rank]), some), strict=True
            ):
                expected = self.manifests[rank].sha256
                if found != expected:
                    raise ArtifactError(
                        f"{self.files[rank]}: another file than the one that was written: sha256 "
                        f"{found[:16]}..., the manifest says {expected[:16]}...",
                        COPY_AGAIN,
                    )

    def describe(self) -> str:
        """The layout in short: tp=2 dp=1."""
        # The largest number of shards: ranks may share key/value heads.
        tensor = max(math.prod(self.strategy.layouts[name].parts) for name in self.shapes)
        stages = f" pp={self.strategy.stages}" if self.strategy.stages > 1 else ""
        return f"tp={tensor} dp={self.strategy.devices // tensor}{stages}"

    def _owners(self, name: str) -> Iterator[tuple[Index, int]]:
        """Each distinct shard of a tensor, and the first rank that holds it."""
        layout, shape = self.strategy.layouts[name], self.shapes[name]
        seen = set()
        for rank in range(layout.devices):
            bounds = layout.bounds(shape, rank)
            if (key := str(bounds)) not in seen:
                seen.add(key)
                yield bounds, layout.stage * layout.devices + rank


def _overlap(one: Index, other: Index) -> Index | None:
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return None if any(part.start >= part.stop for part in common) else common


def _assembled(shape: tuple[int, ...], pieces: list[tuple[Index, LazyTensor]]) -> LazyTensor:
    """The full tensor of `shape`; a slice of it reads only the shards that it overlaps."""
    if len(pieces) == 1:
        return pieces[0][1]

    def part(index: Index) -> NDArray[Any]:
        full = (*index, *(slice(None),) * (len(shape) - len(index)))
        wanted = tuple(slice(*one.indices(size)[:2]) for one, size in zip(full, shape, strict=True))
        out: NDArray[Any] | None = None
        for bounds, tensor in pieces:
            common = _overlap(bounds, wanted)
            if common is None:
                continue
            values = tensor.piece(_relative(common, bounds))
            if common == wanted:
                return values
            if out is None:
                out = np.empty([one.stop - one.start for one in wanted], values.dtype)
            out[_relative(common, wanted)] = values
            drop_pages(values)
        assert out is not None
        return out

    return LazyTensor(shape, pieces[0][1].dtype, lambda: part(()), part)


def _relative(index: Index, to: Index) -> Index:
    return tuple(
        slice(one.start - base.start, one.stop - base.start)
        for one, base in zip(index, to, strict=True)
    )


def _complete(folder: Path) -> list[Path]:
    """The folders of all ranks, by rank."""
    found = rank_folders(folder)
    numbers = [rank for rank, _ in found]
    for rank, path in found:
        if numbers.count(rank) > 1:
            raise ArtifactError(f"{path}: rank {rank} is in {folder} twice", COPY_AGAIN)
    missing = sorted(set(range(max(numbers, default=0) + 1)) - set(numbers))
    if missing:
        raise ArtifactError(
            f"{folder}: rank {', '.join(map(str, missing[:5]))} is missing of a set of "
            f"rank_0 to rank_{max(numbers, default=0)}",
            COPY_AGAIN,
        )
    return [path for _, path in found]


def _manifests(folder: Path, folders: list[Path]) -> tuple[ShardManifest, ...]:
    """The manifests of all ranks, or none; of one set."""
    read = [read_shard_manifest(path) for path in folders]
    found = tuple(manifest for manifest in read if manifest is not None)
    if not found:
        return ()
    if len(found) < len(read):
        path = folders[read.index(None)]
        raise ArtifactError(f"{path}: no manifest.json, but other ranks have one", COPY_AGAIN)
    for rank, manifest in enumerate(found):
        if manifest.layout != found[0].layout:
            raise ArtifactError(
                f"{folders[rank]}: of another set than {folders[0].name}: tp={manifest.tp} "
                f"dp={manifest.dp} against tp={found[0].tp} dp={found[0].dp}, or another model",
                COPY_AGAIN,
            )
        if manifest.rank != rank:
            raise ArtifactError(
                f"{folders[rank]}: holds the shard of rank {manifest.rank}"
                + (", which occurs twice" if manifest.rank < len(found) else ""),
                COPY_AGAIN,
            )
    if len(found) != found[0].ranks.size:
        raise ArtifactError(
            f"{folder}: {len(found)} ranks of a set of {found[0].ranks.size} "
            f"(tp={found[0].tp} dp={found[0].dp}); rank {len(found)} is missing",
            COPY_AGAIN,
        )
    return found


def last_checkpoint(folder: Path) -> Path:
    """The latest of a training's checkpoints, by the numbers in their names."""
    files = [item for item in folder.iterdir() if item.suffix in _SUFFIXES and item.is_file()]
    if not files:
        raise ArtifactError(
            f"{folder}: the folder holds no .ckpt and no .safetensors file", COPY_AGAIN
        )
    return max(files, key=lambda file: _natural(file.name))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(digits or 0), text) for digits, text in re.findall(r"(\d{1,18})|(\D+)", name)]


def open_shard(file: Path, model: Decoder | None) -> dict[str, LazyTensor]:
    """The tensors of one rank under the model's names; training state is left out.

    Without a model, the tensors of a MindSpore file as they are.
    """
    if file.suffix == ".safetensors":
        stored = open_safetensors(file, is_not_weight)
    else:
        stored = open_ckpt(file)
    found = {canonical_name(name): tensor for name, tensor in stored.items()}
    found = {name: tensor for name, tensor in found.items() if not is_not_weight(name)}
    if model is not None and model.tie_word_embeddings and "lm_head.weight" in found:
        head = found.pop("lm_head.weight")
        embedding = found.get(next(iter(expected_tensors(model))))
        if embedding is not None:
            check_tied_head(head, embedding, str(file))
    return found


def _check_shapes(found: ShardSet) -> None:
    for rank, (file, tensors) in enumerate(zip(found.files, found.held, strict=True)):
        expected = shard_shapes(found.strategy, found.shapes, rank) or {}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if found.strategy.stages > 1:  # a tensor that several stages hold is read from the first
            shapes = {name: shapes[name] for name in shapes if name in expected}
        if shapes != expected:
            where = (
                f"{file} (rank {rank} of {len(found.files)}, sharded as {found.layout_source} says)"
            )
            check_tensors(shapes, expected, where)


def _check_one_set(found: ShardSet) -> None:
    """Ranks that hold the same shard must hold the same values."""
    for name in found.shapes:
        layout = found.strategy.layouts[name]
        start = layout.stage * layout.devices
        first: dict[str, int] = {}
        for rank in range(start, start + layout.devices):
            other = first.setdefault(str(layout.bounds(found.shapes[name], rank - start)), rank)
            one, two = found.held[other][name], found.held[rank][name]
            compared = other != rank and one.nbytes <= MOST_COMPARED
            if two.dtype != found.held[start][name].dtype:
                other, what = start, f"is {two.dtype} and not {found.held[start][name].dtype}"
            elif compared and not same_values(one, two):
                what = "holds other values"
            else:
                continue
            raise ArtifactError(
                f"{found.files[rank]}: of another set than {found.files[other]}: {name} {what}",
                COPY_AGAIN,
            )


def find_layouts(
    folder: Path,
    model: Decoder,
    held: tuple[Mapping[str, LazyTensor], ...],
    manifests: tuple[ShardManifest, ...],
    path: Path | None,
) -> tuple[Strategy, str]:
    own = None
    if manifests:
        first = manifests[0]
        own = strategy_of(model, first.ranks, vocab_parallel=first.vocab_parallel)
        if path is None:
            return own, "the manifest"
    if path is None:
        return _from_shapes(folder, model, held), "the shapes"
    given = _of_model(_given(folder, held, path), expected_tensors(model), path)
    if own is not None:
        for name, shape in expected_tensors(model).items():
            for rank in range(given.devices):
                if given.layouts[name].bounds(shape, rank) != own.layouts[name].bounds(shape, rank):
                    raise ArtifactError(
                        f"{path}: not the strategy of {folder}: its manifest shards {name}"
                        " differently",
                        "leave out src_strategy_path_or_dir: the set has manifests",
                    )
    return given, f"the strategy {path}"


def strategy_in_file(
    folder: Path, held: tuple[Mapping[str, LazyTensor], ...], path: Path | None
) -> tuple[Strategy, dict[str, tuple[int, ...]]]:
    """The strategy in `path` of an unknown model's shards, and the shapes of the full tensors."""
    given = _given(folder, held, path)
    shapes = {}
    for name, layout in given.layouts.items():
        tensor = held[layout.stage * layout.devices].get(name)
        if tensor is not None:  # a network may have parameters that are not saved
            pairs = zip(tensor.shape, layout.parts, strict=False)
            shapes[name] = tuple(size * parts for size, parts in pairs)
    if not shapes:
        raise ArtifactError(f"{path}: the strategy of another model: it has none of its tensors")
    return _of_model(given, shapes, path or folder), shapes


def _given(folder: Path, held: tuple[Mapping[str, LazyTensor], ...], path: Path | None) -> Strategy:
    """The strategy in `path`, validated to have as many ranks; one rank needs none."""
    if path is None and len(held) == 1:
        return Strategy({name: unsharded(tensor) for name, tensor in held[0].items()})
    hint = "give the strategy that the checkpoint was written with"
    if path is None:
        raise ArtifactError(
            f"{folder}: nothing describes how its {len(held)} ranks are sharded", hint
        )
    given = read_strategy(path)
    if given.ranks != len(held):
        raise ArtifactError(
            f"{folder}: {len(held)} ranks, but the strategy {path} is of {given.ranks}", hint
        )
    return Strategy(
        {canonical_name(name): one for name, one in given.layouts.items()}, given.stages
    )


def unsharded(tensor: LazyTensor) -> Layout:
    """The layout of a replicated tensor on one rank."""
    return Layout((1,), ((),) * len(tensor.shape))


def _of_model(strategy: Strategy, shapes: Mapping[str, tuple[int, ...]], path: Path) -> Strategy:
    """The layouts of the model's tensors. Raises ArtifactError."""
    layouts = strategy.layouts
    missing = [name for name in shapes if name not in layouts]
    if missing:
        raise ArtifactError(
            f"{path}: the strategy of another model: it lacks {len(missing)} of {len(shapes)} "
            f"parameters: {', '.join(missing[:5])}",
            "check that model= and src_strategy_path_or_dir= belong together",
        )
    for name, shape in shapes.items():
        if not layouts[name].fits(shape):
            raise ArtifactError(
                f"{path}: the strategy of another model: {name} {list(shape)} cannot be sharded by "
                f"{layouts[name].dev_matrix}, {layouts[name].tensor_map}",
                "check that model= and src_strategy_path_or_dir= belong together",
            )
    return Strategy({name: layouts[name] for name in shapes}, strategy.stages)


def _from_shapes(
    folder: Path, model: Decoder, held: tuple[Mapping[str, LazyTensor], ...]
) -> Strategy:
    """This project's layout that gives the shapes of rank 0."""
    shapes = expected_tensors(model)
    found = {name: tensor.shape for name, tensor in held[0].items()}
    for tensor in range(1, MOST_PARTS + 1):
        for vocab_parallel in (True, False):
            tried = strategy_of(model, Ranks(tensor=tensor), vocab_parallel=vocab_parallel)
            if found != shard_shapes(tried, shapes, 0):
                continue
            if len(held) % tensor:
                raise ArtifactError(
                    f"{folder}: {len(held)} ranks, but their shapes are those of tp={tensor}: "
                    "ranks are missing, or too many",
                    "copy the whole set again, or shard the checkpoint again (run_mode=shard)",
                )
            ranks = Ranks(data=len(held) // tensor, tensor=tensor)
            return strategy_of(model, ranks, vocab_parallel=vocab_parallel)
    raise ArtifactError(
        f"{folder}: the shapes of its {len(held)} ranks match no known sharding of the model",
        "check that model= and load_checkpoint= belong together; for another sharding give "
        "src_strategy_path_or_dir=",
    )


def shard_shapes(
    strategy: Strategy, shapes: Mapping[str, tuple[int, ...]], rank: int
) -> dict[str, tuple[int, ...]] | None:
    """Shapes of a rank's shards of tensors of `shapes`; None if they are not divisible so."""
    stage, local = divmod(rank, strategy.devices)
    found = {}
    for name, shape in shapes.items():
        layout = strategy.layouts[name]
        if not layout.fits(shape):
            return None
        if layout.stage == stage:
            found[name] = tuple(part.stop - part.start for part in layout.bounds(shape, local))
    return found
