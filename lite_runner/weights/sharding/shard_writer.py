"""Writing a checkpoint sharded for many ranks, or merged into one file, with little memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import make_folder, new_folder, require_space, sha256_of
from lite_runner.weights import LazyTensor, watched
from lite_runner.weights.checkpoint import rank_folders
from lite_runner.weights.formats import hf_from_model_config
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.sharding.partition import Strategy, sliced, strategy_of
from lite_runner.weights.sharding.shard_manifest import ShardManifest, read_shard_manifest
from lite_runner.weights.sharding.strategy import write_strategy
from lite_runner.weights.write import check_free, write_files

ShardFormat = Literal["ckpt", "safetensors"]
STRATEGY_FOLDER, STRATEGY_FILE = "strategy", "ckpt_strategy_rank_{}.ckpt"
SMALL_FILES = 1 << 20  # bytes, an upper bound for a rank's manifest, strategy and headers


@dataclass(frozen=True)
class Cutting:
    """Layout, format and names of the shards to write."""

    strategy: Strategy  # of one stage
    format: ShardFormat
    prefix: str = "checkpoint_"  # prefix of the shards' names
    model: Decoder | None = None  # None: unknown, and the shards get no manifests
    ranks: Ranks = Ranks()
    vocab_parallel: bool = True

    @classmethod
    def of_model(
        cls, model: Decoder, ranks: Ranks, format: ShardFormat, *, vocab_parallel: bool
    ) -> Cutting:
        """This project's layout of a model on `ranks`, whose own rank is ignored."""
        strategy = strategy_of(model, ranks, vocab_parallel=vocab_parallel)
        return cls(strategy, format, model=model, ranks=ranks, vocab_parallel=vocab_parallel)

    def manifest(self, rank: int, shard: Path | None = None) -> ShardManifest | None:
        """The manifest of a rank, and of its `shard` once that is written; None for shards of an
        unknown model."""
        if self.model is None:
            return None
        name, sha256 = ("", "") if shard is None else (shard.name, sha256_of(shard))
        data, tensor, model = self.ranks.data, self.ranks.tensor, hf_from_model_config(self.model)
        return ShardManifest(rank, data, tensor, self.vocab_parallel, name, sha256, model)

    def of_rank(self, rank: int, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The shards that `rank` holds of the full `tensors`; all of one without a layout."""
        found = dict(tensors)
        for name, tensor in tensors.items():
            layout = self.strategy.layouts.get(name)
            if layout is not None and any(layout.tensor_map):
                found[name] = sliced(tensor, layout.bounds(tensor.shape, rank))
        return found


def write_merged(
    target: Path,
    tensors: Mapping[str, LazyTensor],
    format: ShardFormat,
    *,
    overwrite: bool,
    advance: Callable[[int], None],
) -> None:
    """Write the full `tensors` to one file, atomically.

    Raises ConfigError if it exists, EnvironmentFault if the disk is too small.
    """
    check_free(target, overwrite)
    _write(target, format, _counted(tensors, advance, threading.Event()))


def write_shards(
    target: Path,
    tensors: Mapping[str, LazyTensor],
    cutting: Cutting,
    *,
    extra: Mapping[str, bytes],
    only_rank: int | None = None,
    workers: int,
    overwrite: bool,
    advance: Callable[[int], None],
) -> None:
    """Write rank_0 ... with a shard and a manifest each, and strategy/ with a file per rank.

    `extra`: small files beside them. With `only_rank` only its folder is written into `target`,
    beside ranks of the same layout. `workers`: ranks written in parallel. Each folder is written
    atomically. Raises ConfigError if it exists (without `overwrite`), EnvironmentFault if the disk
    is too small.
    """
    ranks = range(cutting.strategy.ranks) if only_rank is None else [only_rank]
    folder = target if only_rank is None else target / f"rank_{only_rank}"
    check_free(folder, overwrite)
    if only_rank is not None:
        _check_neighbours(target, cutting)
    make_folder(target.parent)
    size = sum(
        sum(piece.nbytes for piece in cutting.of_rank(rank, tensors).values()) + SMALL_FILES
        for rank in ranks
    )
    require_space(target.parent, size)
    stop = threading.Event()

    def write(folder: Path, rank: int) -> None:
        file = folder / f"{cutting.prefix}{rank}.{cutting.format}"
        _write(file, cutting.format, _counted(cutting.of_rank(rank, tensors), advance, stop))
        if manifest := cutting.manifest(rank, file):
            manifest.write(folder)

    if only_rank is not None:
        with new_folder(folder) as fresh:
            write(fresh, only_rank)
        write_strategies(target / STRATEGY_FOLDER, cutting, ranks)
        write_files(target, extra)
        return
    with new_folder(folder) as fresh, ThreadPoolExecutor(workers, "write-shard") as pool:
        for rank in ranks:
            (fresh / f"rank_{rank}").mkdir()
        waiting = [pool.submit(write, fresh / f"rank_{rank}", rank) for rank in ranks]
        try:
            write_strategies(fresh / STRATEGY_FOLDER, cutting, ranks)
            write_files(fresh, extra)
            for one in as_completed(waiting):
                one.result()
        except BaseException:  # on an error or Ctrl-C, do not wait for the rest
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def is_sharded(folder: Path) -> bool:
    """True for what `write_shards` writes."""
    return (folder / STRATEGY_FOLDER).is_dir() and any(rank_folders(folder))


def is_of_strategies(folder: Path) -> bool:
    """True for what `write_strategies` writes, without weights."""
    return folder.is_dir() and all(
        file.match(STRATEGY_FILE.format("*")) for file in folder.iterdir()
    )


def write_strategies(folder: Path, cutting: Cutting, ranks: Sequence[int] | None = None) -> None:
    """Write MindSpore's strategy file of each of `ranks` (all of them, unless given)."""
    for rank in range(cutting.strategy.ranks) if ranks is None else ranks:
        write_strategy(folder / STRATEGY_FILE.format(rank), cutting.strategy)


class _Stopped(Exception):
    """Another worker failed, or the user stopped the run."""


def _write(file: Path, format: ShardFormat, tensors: Mapping[str, LazyTensor]) -> None:
    if format == "ckpt":
        write_ckpt(file, tensors)
    else:
        write_safetensors(file, tensors, {"format": "ms"})


def _check_neighbours(target: Path, cutting: Cutting) -> None:
    """Ranks beside one that is written alone must have the same layout."""
    wanted = cutting.manifest(0)
    for _, path in rank_folders(target):
        other = read_shard_manifest(path)
        if (wanted and wanted.layout) != (other and other.layout):
            sets = [f"tp={one.tp} dp={one.dp}" if one else "no manifest" for one in (other, wanted)]
            raise ConfigError(
                f"{path}: of another set ({sets[0]}) than the one asked for ({sets[1]})",
                "give shard_output= another folder",
            )


def _counted(
    tensors: Mapping[str, LazyTensor], advance: Callable[[int], None], stop: threading.Event
) -> dict[str, LazyTensor]:
    """The tensors; reading one counts its bytes, and raises once `stop` is set."""

    def count(array: NDArray[Any]) -> None:
        if stop.is_set():
            raise _Stopped
        advance(array.nbytes)

    return {name: watched(tensor, count) for name, tensor in tensors.items()}
