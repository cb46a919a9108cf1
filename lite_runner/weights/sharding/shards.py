"""Checkpoints that are cut for many ranks: a folder of rank_0, rank_1, ..., a file in each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.system.files import sha256_of
from lite_runner.weights.checkpoint import carries_no_weights, own_name
from lite_runner.weights.derive import same_values
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.hugging_face import check_tied_head
from lite_runner.weights.formats.safetensors_file import open_safetensors
from lite_runner.weights.layouts import check_tensors, expected_tensors
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.sharding.shard_layout import how_cut, piece_shapes, strategy_in_file
from lite_runner.weights.sharding.shard_manifest import (
    ShardManifest,
    rank_folders,
    read_shard_manifest,
)
from lite_runner.weights.sharding.strategy import Layout, Strategy
from lite_runner.weights.tensor import Index, LazyTensor

SUFFIXES = (".ckpt", ".safetensors")
MOST_COMPARED = 1 << 20  # bytes of a tensor that is compared between the ranks that hold it
HASH_THREADS = 4
COPY_AGAIN = "copy the whole set again, or cut the checkpoint again (run_mode=shard)"


@dataclass(frozen=True)
class ShardSet:
    """A sharded checkpoint that is complete and whose shapes were checked."""

    folder: Path
    files: tuple[Path, ...]  # of each rank
    held: tuple[Mapping[str, LazyTensor], ...]  # of each rank, in the model's names
    strategy: Strategy
    shapes: Mapping[str, tuple[int, ...]]  # of the whole tensors
    manifests: tuple[ShardManifest, ...]  # none, or one a rank
    told_by: str  # what said how it is cut

    def whole(self) -> dict[str, LazyTensor]:
        """Every tensor of the model, put together from its pieces when it is read."""
        return {name: _assembled(self.shapes[name], self._pieces(name)) for name in self.shapes}

    def rank_with(self, target: Strategy, rank: int) -> int | None:
        """The rank whose shard is just what `rank` of `target` holds; None where there is none."""
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
        """The ranks whose shards hold something of what `rank` of `target` holds."""
        return {
            own
            for name, shape in self.shapes.items()
            for bounds, own in self._owners(name)
            if _overlap(bounds, target.layouts[name].bounds(shape, rank)) is not None
        }

    def verify(self, ranks: Iterable[int]) -> None:
        """Compare the shards of `ranks` with their manifests. Raises ArtifactError."""
        if not self.manifests:
            return
        some = sorted(ranks)
        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="sha256") as pool:
            for rank, found in zip(
                some, pool.map(lambda rank: sha256_of(self.files[rank]), some), strict=True
            ):
                expected = self.manifests[rank].sha256
                if found != expected:
                    raise ArtifactError(
                        f"{self.files[rank]}: another file than the one that was written: sha256 "
                        f"{found[:16]}..., the manifest says {expected[:16]}...",
                        COPY_AGAIN,
                    )

    def describe(self) -> str:
        """The cut in words: tp=2 dp=1."""
        shapes = self.shapes.items()
        # The most that any tensor is cut in: fewer where the ranks share key/value heads.
        tensor = max(
            (len({str(layout.bounds(shape, rank)) for rank in range(layout.devices)}))
            for (_, shape), layout in zip(shapes, map(self._layout, self.shapes), strict=True)
        )
        stages = f" pp={self.strategy.stages}" if self.strategy.stages > 1 else ""
        return f"tp={tensor} dp={self.strategy.devices // tensor}{stages}"

    def _layout(self, name: str) -> Layout:
        return self.strategy.layouts[name]

    def _owners(self, name: str) -> Iterator[tuple[Index, int]]:
        """Each different piece of a tensor, and the first rank that holds it."""
        layout, shape = self._layout(name), self.shapes[name]
        seen = set()
        for rank in range(layout.devices):
            bounds = layout.bounds(shape, rank)
            if (key := str(bounds)) not in seen:
                seen.add(key)
                yield bounds, layout.stage * layout.devices + rank

    def _pieces(self, name: str) -> list[tuple[Index, LazyTensor]]:
        return [(bounds, self.held[rank][name]) for bounds, rank in self._owners(name)]


def open_shards(folder: Path, model: Decoder | None, strategy: Path | None = None) -> ShardSet:
    """The sharded checkpoint in `folder`, of which only the headers are read.

    How it is cut say the manifests that run_mode=shard writes, else the file or folder `strategy`,
    else the shapes. Without a `model` the tensors are those that the shards hold. Raises
    ArtifactError where ranks are missing, belong to different sets, or hold something else than
    that cut of `model`.
    """
    folders = _complete(folder)
    manifests = _manifests(folder, folders)
    files = tuple(
        path / manifests[rank].file if manifests else _last_checkpoint(path)
        for rank, path in enumerate(folders)
    )
    if len({file.suffix for file in files}) > 1:
        other = next(file for file in files if file.suffix != files[0].suffix)
        raise ArtifactError(
            f"{folder}: of mixed formats: {files[0]} and {other}",
            "keep the checkpoints of one format in the rank_* folders",
        )
    if model is None and manifests:
        model = manifests[0].model
    held = tuple(open_shard(file, model) for file in files)
    if model is None:
        layouts, shapes = strategy_in_file(folder, held, strategy)
        told_by = f"the strategy {strategy}"
    else:
        shapes = expected_tensors(model)
        layouts, told_by = how_cut(folder, model, held, manifests, strategy)
    found = ShardSet(folder, files, held, layouts, shapes, manifests, told_by)
    _check_shapes(found)
    _check_one_set(found)
    return found


def _complete(folder: Path) -> list[Path]:
    """The folders of all ranks in their order."""
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
        if manifest.cut != found[0].cut:
            raise ArtifactError(
                f"{folders[rank]}: of another set than {folders[0].name}: tp={manifest.tp} "
                f"dp={manifest.dp} against tp={found[0].tp} dp={found[0].dp}, or another model",
                COPY_AGAIN,
            )
        if manifest.rank != rank:
            raise ArtifactError(
                f"{folders[rank]}: holds the shard of rank {manifest.rank}"
                + (", which is there twice" if manifest.rank < len(found) else ""),
                COPY_AGAIN,
            )
    if len(found) != found[0].ranks.size:
        raise ArtifactError(
            f"{folder}: {len(found)} ranks of a set of {found[0].ranks.size} "
            f"(tp={found[0].tp} dp={found[0].dp}); rank {len(found)} is missing",
            COPY_AGAIN,
        )
    return found


def _last_checkpoint(folder: Path) -> Path:
    """The last of the checkpoints that a training left, numbers in their names counted."""
    files = [item for item in folder.iterdir() if item.suffix in SUFFIXES and item.is_file()]
    if not files:
        raise ArtifactError(
            f"{folder}: the folder holds no .ckpt and no .safetensors file", COPY_AGAIN
        )
    return max(files, key=lambda file: _natural(file.name))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(digits or 0), text) for digits, text in re.findall(r"(\d{1,18})|(\D+)", name)]


def open_shard(file: Path, model: Decoder | None) -> dict[str, LazyTensor]:
    """The tensors of one rank in the model's names; what training keeps beside them is left out.

    Without a model, the tensors of a MindSpore file as they are.
    """
    if file.suffix == ".safetensors":
        stored = open_safetensors(file, carries_no_weights)
    else:
        stored = open_ckpt(file)
    found = {own_name(name): tensor for name, tensor in stored.items()}
    found = {name: tensor for name, tensor in found.items() if not carries_no_weights(name)}
    if model is not None and model.tie_word_embeddings and "lm_head.weight" in found:
        head, embedding = (
            found.pop("lm_head.weight"),
            found.get(next(iter(expected_tensors(model)))),
        )
        if embedding is not None:
            check_tied_head(head, embedding, str(file))
    return found


def _check_shapes(found: ShardSet) -> None:
    for rank, (file, tensors) in enumerate(zip(found.files, found.held, strict=True)):
        expected = piece_shapes(found.strategy, found.shapes, rank) or {}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if found.strategy.stages > 1:  # a tensor that several stages hold is read from the first
            shapes = {name: shapes[name] for name in shapes if name in expected}
        if shapes != expected:
            where = f"{file} (rank {rank} of {len(found.files)}, cut as {found.told_by} says)"
            check_tensors(shapes, expected, where)


def _check_one_set(found: ShardSet) -> None:
    """The ranks must hold the same values where they hold the same piece."""
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


def _overlap(one: Index, other: Index) -> Index | None:
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return None if any(part.start >= part.stop for part in common) else common


def _assembled(shape: tuple[int, ...], pieces: list[tuple[Index, LazyTensor]]) -> LazyTensor:
    """The whole tensor of `shape`; what is read of it is read from the pieces it lies in."""
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
