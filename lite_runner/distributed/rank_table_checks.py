"""Validation errors of a config's rank table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lite_runner.config.fields import Fault, fault
from lite_runner.config.schema import RunConfig
from lite_runner.distributed.rank_table_file import read_rank_table


def rank_table_faults(config: RunConfig) -> Iterator[Fault]:
    """Why the rank table does not match the config.

    Raises ArtifactError for a file that is missing or no rank table.
    """
    path, ranks = config.parallel.rank_table_file, config.parallel_config
    key = "parallel.rank_table_file"
    if not path:
        return
    if not config.use_parallel:
        yield fault((key, "use_parallel"), f"{key} has an effect only with use_parallel=true")
        return
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
