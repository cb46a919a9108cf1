"""A checkpoint's tensors for a run: full, or one rank's shards, resharded on the fly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.sharding.pieces import pieces
from lite_runner.weights.sharding.shard_manifest import rank_folders
from lite_runner.weights.sharding.shards import open_shards
from lite_runner.weights.sharding.strategy import strategy_of
from lite_runner.weights.tensor import LazyTensor


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
    with another layout only if `auto_trans`; nothing is written. Only the shards that this rank
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
    if not auto_trans:
        raise ArtifactError(
            f"{source}: cut for {shards.describe()} (as {shards.layout_source} says), this run "
            f"wants tp={ranks.tensor} dp={ranks.data}",
            "auto_trans_ckpt=true re-cuts it while it is read; run_mode=shard writes another cut",
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
            f"{source}: a whole checkpoint, and {strategy} would say how shards of it are cut",
            "leave out src_strategy_path_or_dir, or give load_checkpoint= the folder of rank_*",
        )
    return open_checkpoint(source, model)
