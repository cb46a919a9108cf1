"""Opening a checkpoint sharded for many ranks: a folder of rank_0, rank_1, ..., a file in each."""

from __future__ import annotations

from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.derive import same_values
from lite_runner.weights.layouts import check_tensors, expected_tensors
from lite_runner.weights.sharding.shard_file import last_checkpoint, open_shard
from lite_runner.weights.sharding.shard_layout import find_layouts, shard_shapes, strategy_in_file
from lite_runner.weights.sharding.shard_manifest import (
    ShardManifest,
    rank_folders,
    read_shard_manifest,
)
from lite_runner.weights.sharding.shard_set import COPY_AGAIN, ShardSet

MOST_COMPARED = 1 << 20  # bytes; larger replicated tensors are not compared between ranks


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
        model = manifests[0].model
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


def _check_shapes(found: ShardSet) -> None:
    for rank, (file, tensors) in enumerate(zip(found.files, found.held, strict=True)):
        expected = shard_shapes(found.strategy, found.shapes, rank) or {}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if found.strategy.stages > 1:  # a tensor that several stages hold is read from the first
            shapes = {name: shapes[name] for name in shapes if name in expected}
        if shapes != expected:
            where = f"{file} (rank {rank} of {len(found.files)}, cut as {found.layout_source} says)"
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
