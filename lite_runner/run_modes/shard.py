"""run_mode=shard: a checkpoint sharded for the ranks of a parallel group, merged, or resharded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from lite_runner import progress
from lite_runner.config import Invalid, invalid
from lite_runner.config.checks import check_fits, strategy_errors
from lite_runner.config.schema import OverwriteOptions, SaveStrategyOptions, StrategyOptions
from lite_runner.model.locate import locate_for_plan, side_files
from lite_runner.output import Result, RunFolder
from lite_runner.plan import Plan
from lite_runner.records import Count, Index, OutputPath, dataclass
from lite_runner.sizing import float32_bytes, model_lines
from lite_runner.system.files import new_folder, readable
from lite_runner.weights.sharding.shard_writer import (
    Cutting,
    is_of_strategies,
    is_sharded,
    write_merged,
    write_shards,
    write_strategies,
)
from lite_runner.weights.write import (
    check_free,
    check_not_source,
    check_replaced,
    files_folder,
    write_beside,
)

if TYPE_CHECKING:
    from lite_runner.architectures.spec import Decoder
    from lite_runner.model import ModelFiles


@dataclass(frozen=True, kw_only=True)
class Config(StrategyOptions, SaveStrategyOptions, OverwriteOptions):
    """run_mode=shard"""

    takes_parallel: ClassVar[bool] = True
    writes_floats: ClassVar[bool] = True

    shard_output: OutputPath  # "": named in output_dir
    shard_format: Literal["ckpt", "safetensors"]
    transform_process_num: Count
    transform_rank: Index | None  # null: all

    @property
    def vocab_parallel(self) -> bool:
        """As RunConfig's, but whole by default: so a network of MindFormers is loaded, and a run of
        ours cuts them as it reads."""
        return self.parallel_config.vocab_emb_dp is False


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of sharding and merging."""
    yield from strategy_errors(config)
    strategy = config.src_strategy_path_or_dir
    if strategy and config.only_save_strategy:
        yield invalid(
            ("src_strategy_path_or_dir", "only_save_strategy"),
            f"src_strategy_path_or_dir={strategy} has no effect with only_save_strategy=true,"
            " which reads no weights",
        )
    asked = config.parallel_config
    ranks = asked.data_parallel * asked.model_parallel if config.use_parallel else 1
    suffix = f".{config.shard_format}"
    one_file = ranks == 1 and not config.only_save_strategy
    if one_file and config.shard_output and not config.shard_output.endswith(suffix):
        yield invalid(
            ("shard_output", "shard_format", "parallel"),
            f"shard_output: got {config.shard_output}, expected the name of a {suffix} file to"
            " merge to; parallel=tp2 (or another) shards for several ranks",
        )
    if config.transform_rank is not None and config.transform_rank >= ranks:
        yield invalid(
            ("transform_rank", "parallel"),
            f"transform_rank: got {config.transform_rank}, expected less than the {ranks} of the"
            " parallel group",
        )
    if config.transform_rank is not None and config.only_save_strategy:
        yield invalid(
            ("transform_rank", "only_save_strategy"),
            "transform_rank has no effect with only_save_strategy=true, which writes no weights",
        )


def plan(config: Config) -> Plan:
    """The checkpoint and what is written. With dry_run=true nothing is fetched. Raises
    RunnerError."""
    target, ranks = _target(config), config.ranks
    if config.transform_rank is None:
        check_free(target, config.overwrite)
        if config.only_save_strategy:
            check_replaced(target, "a folder of strategies", ours=is_of_strategies(target))
        elif ranks.size == 1:
            check_free(files_folder(target), config.overwrite)
        else:
            ours = is_sharded(target) or is_of_strategies(target)
            check_replaced(target, "a sharded checkpoint", ours=ours)
    model = config.model_config()
    sizes_alone = config.only_save_strategy and model is not None and not config.dry_run
    files = None if sizes_alone else locate_for_plan(config.source)
    if files is not None:
        model = files.model
        if ranks.size > 1:
            one = config.transform_rank
            check_not_source(
                "shard_output", target if one is None else target / f"rank_{one}", files.path
            )
    assert model is not None
    _cutting(config, model)
    size = readable(float32_bytes(model))
    what = f"rank_0 to rank_{ranks.size - 1}, {size} together" if ranks.size > 1 else size
    if config.transform_rank is not None:
        what = f"rank_{config.transform_rank} of {ranks.size} alone"
    if config.only_save_strategy:
        what = "the strategy alone"
    else:
        what += " where it is float32"
    source = config.checkpoint_source if files is None else files.location()
    lines = model_lines(config.run_mode, config.model_name, model, source)
    lines |= {"ranks": f"tp={ranks.tensor} dp={ranks.data}", "writes": f"{target}: {what}"}
    return Plan(config=config, ranks=ranks, files=files, lines=lines)


def run(plan: Plan, folder: RunFolder) -> None:
    """Write `shard_output`. Raises RunnerError; nothing half-written gets the final name."""
    began = time.perf_counter()
    config = plan.config
    assert isinstance(config, Config)
    target = _target(config)
    model = plan.files.model if plan.files is not None else config.model_config()
    assert model is not None
    cutting = _cutting(config, model)
    if config.only_save_strategy:
        with new_folder(target) as fresh:
            write_strategies(fresh, cutting)
    else:
        _write(config, plan.model, cutting, target)
    ranks = cutting.strategy.ranks
    folder.write_result(Result.of_files(plan, config.checkpoint_source, began, world_size=ranks))
    progress.note(f"wrote {target}")


def _target(config: Config) -> Path:
    """The path to write: a folder, or the file of a merged checkpoint."""
    if config.shard_output:
        return Path(config.shard_output).expanduser()
    ranks = config.ranks
    name = f"{config.model_name}_tp{ranks.tensor}_dp{ranks.data}"
    if config.only_save_strategy:
        name += "_strategy"
    elif ranks.size == 1:
        name = f"{config.model_name}.{config.shard_format}"
    return Path(config.output_dir).expanduser() / name


def _cutting(config: Config, model: Decoder) -> Cutting:
    """Raises ConfigError where the model does not divide like that."""
    if config.model_config() is None:  # model=auto: not checked so far
        check_fits(config, model)
    return Cutting.of_model(
        model, config.ranks, config.shard_format, vocab_parallel=config.vocab_parallel
    )


def _write(config: Config, files: ModelFiles, cutting: Cutting, target: Path) -> None:
    overwrite = config.overwrite
    tensors = files.whole()
    ranks = config.ranks
    merging = ranks.size == 1
    beside = side_files(config.tokenizer, files)
    size = sum(tensor.nbytes for tensor in tensors.values())
    name = "merge" if merging else f"shard for tp={ranks.tensor} dp={ranks.data}"
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
