"""The keys of sharding and merging checkpoints, and their validation errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from lite_runner.config.checks import strategy_faults
from lite_runner.config.fields import Fault, fault
from lite_runner.config.options import OverwriteOptions, SaveStrategyOptions, StrategyOptions
from lite_runner.config.quantization_checks import written_as_floats
from lite_runner.config.ranges import Count, Index
from lite_runner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class ShardOptions(StrategyOptions, SaveStrategyOptions, OverwriteOptions):
    """What to write, and for which ranks."""

    takes_parallel: ClassVar[bool] = True

    shard_output: str  # "": named in output_dir
    shard_format: Literal["ckpt", "safetensors"]
    transform_process_num: Count
    transform_rank: Index | None  # null: all


def shard_faults(config: ShardOptions) -> Iterator[Fault]:
    """Validation errors of sharding and merging."""
    yield from written_as_floats(config)
    yield from strategy_faults(config)
    strategy = config.src_strategy_path_or_dir
    if strategy and config.only_save_strategy:
        yield fault(
            ("src_strategy_path_or_dir", "only_save_strategy"),
            f"src_strategy_path_or_dir={strategy} has no effect with only_save_strategy=true,"
            " which reads no weights",
        )
    asked = config.parallel_config
    ranks = asked.data_parallel * asked.model_parallel if config.use_parallel else 1
    suffix = f".{config.shard_format}"
    one_file = ranks == 1 and not config.only_save_strategy
    if one_file and config.shard_output and not config.shard_output.endswith(suffix):
        yield fault(
            ("shard_output", "shard_format", "parallel"),
            f"shard_output: got {config.shard_output}, expected the name of a {suffix} file to"
            " merge to; parallel=tp2 (or another) shards for several ranks",
        )
    if config.transform_rank is not None and config.transform_rank >= ranks:
        yield fault(
            ("transform_rank", "parallel"),
            f"transform_rank: got {config.transform_rank}, expected less than the {ranks} of the"
            " parallel group",
        )
    if config.transform_rank is not None and config.only_save_strategy:
        yield fault(
            ("transform_rank", "only_save_strategy"),
            "transform_rank has no effect with only_save_strategy=true, which writes no weights",
        )
