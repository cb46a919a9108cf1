"""The rank table that a run uses, and its validation errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lite_runner import progress
from lite_runner.config.cluster import starts_ranks
from lite_runner.config.fields import Fault, fault, raise_faults
from lite_runner.config.schema import RunConfig
from lite_runner.system import environment
from lite_runner.system.ascend_devices import index_of


def rank_table_faults(config: RunConfig) -> Iterator[Fault]:
    """Validation errors of the config's rank table.

    Raises ArtifactError for a file that is missing or no rank table.
    """
    path, ranks = config.parallel.rank_table_file, config.parallel_config
    key = "parallel.rank_table_file"
    if not path:
        return
    if not config.use_parallel:
        yield fault((key, "use_parallel"), f"{key} has an effect only with use_parallel=true")
        return
    from lite_runner.distributed.rank_table_file import read_rank_table

    table = read_rank_table(Path(path))
    if clash := table.clash():
        yield fault(key, f"{key}: {path} is of no cluster: {clash}")
    wanted = ranks.data_parallel * ranks.model_parallel
    if table.ranks != wanted:
        yield fault(
            (key, "parallel", "parallel_config.data_parallel", "parallel_config.model_parallel"),
            f"{key}: {path} has {table.ranks} ranks, expected {wanted}:"
            f" data_parallel={ranks.data_parallel} times model_parallel={ranks.model_parallel}",
        )


def with_rank_table(config: RunConfig) -> RunConfig:
    """The config with the rank table of the environment (RANK_TABLE_FILE, set by Kubernetes
    operators) if the run needs one, and with the device of a table of one rank.

    Raises ConfigError if the table is of another job, ArtifactError for a broken one.
    """
    parallel, offered = config.parallel, os.environ.get("RANK_TABLE_FILE")
    on_ascend = config.on_ranks and _is_ascend(config)
    table = parallel.rank_table_file
    if table is None:
        wanted = on_ascend and starts_ranks(config)
        table = offered if offered and wanted else ""
        if offered and config.on_ranks and not wanted:
            why = "it is for Ascend" if not on_ascend else "this is one process"
            progress.note(f"RANK_TABLE_FILE={offered} is not used: {why}")
        config = replace(config, parallel=replace(parallel, rank_table_file=table))
        if table:
            raise_faults(list(rank_table_faults(config)))
    if table and on_ascend and not starts_ranks(config):
        from lite_runner.distributed.rank_table_file import read_rank_table

        device_id = index_of(read_rank_table(Path(table)).device_of(0))
        config = replace(config, context=replace(config.context, device_id=device_id))
    return config


def _is_ascend(config: RunConfig) -> bool:
    return config.context.device_target != "CPU" and environment.ascend_devices() > 0
