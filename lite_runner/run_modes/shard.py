"""run_mode=shard: a checkpoint cut for the ranks of a parallel group, merged, or cut anew."""

from __future__ import annotations

import time
from pathlib import Path

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.config.checks import fits_model
from lite_runner.config.cluster import ranks_of
from lite_runner.config.compose import raise_faults
from lite_runner.config.quantization import Quantization
from lite_runner.config.schema import RunConfig
from lite_runner.model import model_files
from lite_runner.model.model_files import ModelFiles
from lite_runner.output.report import Result, RunFolder
from lite_runner.sizing.need import about_model, aligned, readable, weight_bytes
from lite_runner.weights.files import new_folder
from lite_runner.weights.sharding.shard_writer import (
    Cutting,
    check_free,
    write_merged,
    write_shards,
    write_strategies,
)
from lite_runner.weights.write import files_folder, write_beside


def run(config: RunConfig, folder: RunFolder) -> None:
    """Write `shard_output`. Raises RunnerError; nothing half-written gets the final name."""
    began = time.perf_counter()
    target, overwrite = _target(config), bool(config.overwrite)
    model = config.model_config()
    if config.only_save_strategy and model is not None:
        cutting = _cutting(config, model)
    else:
        files = model_files.locate(config)
        cutting = _cutting(config, files.model)
    if config.only_save_strategy:
        check_free(target, overwrite)
        with new_folder(target) as fresh:
            write_strategies(fresh, cutting)
    else:
        if config.transform_rank is None:  # before the shards are compared with their manifests
            check_free(target, overwrite)
            check_free(files_folder(target), overwrite)
        _write(config, files, cutting, target)
    ranks = cutting.strategy.ranks
    folder.write_result(Result.of_files(config, config.checkpoint_source, began, world_size=ranks))
    progress.note(f"wrote {target}")


def planned(config: RunConfig) -> list[str]:
    """The lines of dry_run=true. Raises RunnerError as `run` would."""
    target, ranks = _target(config), ranks_of(config)
    if config.transform_rank is None:
        check_free(target, bool(config.overwrite))
    files = model_files.planned(config)
    _cutting(config, files.model)
    size = readable(weight_bytes(files.model, "float32", Quantization()))
    what = f"rank_0 to rank_{ranks.size - 1}, {size} together" if ranks.size > 1 else size
    if config.transform_rank is not None:
        what = f"rank_{config.transform_rank} of {ranks.size} alone"
    if config.only_save_strategy:
        what = "the strategy alone"
    else:
        what += " where it is float32"
    lines = about_model(config, files.model, files.whereabouts())
    lines |= {"ranks": f"tp={ranks.tensor} dp={ranks.data}", "writes": f"{target}: {what}"}
    return aligned(lines)


def _target(config: RunConfig) -> Path:
    """What to write: a folder, or the file of a merged checkpoint."""
    if config.shard_output:
        return Path(config.shard_output).expanduser()
    ranks = ranks_of(config)
    name = f"{config.model_name}_tp{ranks.tensor}_dp{ranks.data}"
    if config.only_save_strategy:
        name += "_strategy"
    elif ranks.size == 1:
        name = f"{config.model_name}.{config.shard_format}"
    return Path(config.output_dir).expanduser() / name


def _cutting(config: RunConfig, model: Decoder) -> Cutting:
    """Raises ConfigError where the model does not divide like that."""
    if config.model_config() is None:  # model=auto: not checked so far
        raise_faults(list(fits_model(config, model)))
    assert config.shard_format
    return Cutting.of_model(
        model, ranks_of(config), config.shard_format, vocab_parallel=config.vocab_parallel
    )


def _write(config: RunConfig, files: ModelFiles, cutting: Cutting, target: Path) -> None:
    assert config.transform_process_num
    overwrite = bool(config.overwrite)
    tensors = files.whole()
    ranks = ranks_of(config)
    merging = ranks.size == 1
    beside = model_files.files_beside(config, files)
    size = sum(tensor.nbytes for tensor in tensors.values())
    name = "merge" if merging else f"cut for tp={ranks.tensor} dp={ranks.data}"
    if not merging:
        chosen = range(ranks.size) if config.transform_rank is None else [config.transform_rank]
        pieces = (cutting.of_rank(rank, tensors).values() for rank in chosen)
        size = sum(piece.nbytes for some in pieces for piece in some)
    with progress.step(name, total=size, unit="B") as step:
        if merging:
            write_merged(target, tensors, cutting.format, overwrite=overwrite, advance=step.advance)
            write_beside(target, beside)
            progress.note(f"wrote {files_folder(target)}: {', '.join(beside)}")
            return
        write_shards(
            target,
            tensors,
            cutting,
            extra=beside,
            only_rank=config.transform_rank,
            workers=config.transform_process_num,
            overwrite=overwrite,
            advance=step.advance,
        )
