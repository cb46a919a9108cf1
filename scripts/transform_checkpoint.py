"""Shard, merge or reshard a checkpoint by strategy files, with the flags of MindFormers.

    python scripts/transform_checkpoint.py --src_checkpoint llama2_7b.ckpt \\
        --dst_checkpoint_dir llama2_7b_2p --dst_strategy strategy_2p
    python scripts/transform_checkpoint.py --src_checkpoint llama2_7b_2p \\
        --src_strategy strategy_2p --dst_checkpoint_dir merged

No model has to be named: the strategies say how each parameter is sharded. Exit codes: 2 for
wrong flags, else those of run_lite.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

from lite_runner import progress, str2bool
from lite_runner.app import guarded
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import rank_folders
from lite_runner.weights.sharding.partition import Strategy
from lite_runner.weights.sharding.shard_writer import Cutting, write_shards
from lite_runner.weights.sharding.shards import open_shard, open_shards, unsharded
from lite_runner.weights.sharding.strategy import read_strategy


def parser() -> argparse.ArgumentParser:
    """The flags of MindFormers' transform_checkpoint.py."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = flags.add_argument
    add("--src_checkpoint", type=Path, required=True, help="a file, or the folder of rank_*")
    add("--dst_checkpoint_dir", "--dst_checkpoint", type=Path, required=True)
    add("--src_strategy", type=Path, help="file or folder; not needed for a whole checkpoint")
    add("--dst_strategy", type=Path, help="file or folder; none: merge to one rank")
    add("--prefix", default="checkpoint_", help="of the names of the shards")
    add("--world_size", type=int, help="ranks to shard for, as --dst_strategy says")
    add("--rank_id", type=int, default=0, help="with --transform_by_rank: the rank to write")
    add("--transform_by_rank", type=str2bool, default=False, help="write one rank only")
    add("--transform_process_num", type=int, default=1, help="ranks written at a time")
    return flags


def source(path: Path, strategy: Path | None) -> tuple[Mapping[str, LazyTensor], str]:
    """The full tensors of the source, and the suffix of its files."""
    if path.is_file():
        return open_shard(path, None), path.suffix
    if not rank_folders(path):
        raise ArtifactError(
            f"{path}: neither a file nor a folder of rank_0, rank_1, ...",
            "give --src_checkpoint a MindSpore checkpoint; run_mode=shard reads other formats",
        )
    shards = open_shards(path, None, strategy)
    shards.verify(range(len(shards.files)))
    return shards.whole(), shards.files[0].suffix


def cutting(
    tensors: Mapping[str, LazyTensor], path: Path | None, suffix: str, prefix: str
) -> Cutting:
    """The target sharding. Raises ArtifactError for a strategy of other tensors."""
    layouts = {name: unsharded(tensor) for name, tensor in tensors.items()}
    if path is not None:
        strategy = read_strategy(path)
        if strategy.stages > 1:
            raise ConfigError(f"{path}: of several pipeline stages, which cannot be written here")
        known = [name for name in tensors if name in strategy.layouts]
        if not known:
            raise ArtifactError(
                f"{path}: the strategy of another model: it has none of its tensors"
            )
        for name in known:
            if not strategy.layouts[name].fits(tensors[name].shape):
                raise ArtifactError(
                    f"{path}: {name} {list(tensors[name].shape)} cannot be cut in "
                    f"{list(strategy.layouts[name].parts)}"
                )
        layouts = dict(strategy.layouts)
    return Cutting(Strategy(layouts), "ckpt" if suffix == ".ckpt" else "safetensors", prefix)


def transform(flags: argparse.Namespace) -> None:
    """Do what the flags say. Raises RunnerError."""
    if Path(f"x{flags.prefix}").name != f"x{flags.prefix}":
        raise ConfigError(f"--prefix: got {flags.prefix!r}, expected the start of a file name")
    if flags.transform_process_num < 1:
        raise ConfigError(f"--transform_process_num: got {flags.transform_process_num}, expected 1")
    tensors, suffix = source(flags.src_checkpoint, flags.src_strategy)
    wanted = cutting(tensors, flags.dst_strategy, suffix, flags.prefix)
    ranks = wanted.strategy.ranks
    if flags.world_size not in (None, ranks):
        raise ConfigError(f"--world_size: got {flags.world_size}, but the strategy is of {ranks}")
    if flags.transform_by_rank and not 0 <= flags.rank_id < ranks:
        raise ConfigError(f"--rank_id: got {flags.rank_id}, expected 0 to {ranks - 1}")
    with progress.step(f"shard for {ranks} ranks", unit="B") as step:
        write_shards(
            flags.dst_checkpoint_dir,
            tensors,
            wanted,
            extra={},
            only_rank=flags.rank_id if flags.transform_by_rank else None,
            workers=flags.transform_process_num,
            overwrite=False,
            advance=step.advance,
        )
    progress.note(f"wrote {flags.dst_checkpoint_dir}")


def main(argv: list[str] | None = None) -> int:
    """Run it; gives the exit code."""
    flags = parser().parse_args(argv)

    def action() -> int:
        transform(flags)
        return 0

    return guarded(action)


if __name__ == "__main__":
    sys.exit(main())
