"""Ranks on Ascend: the rank table of a run, its validation, and the environment of its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner import progress
from lite_runner.config import Invalid, invalid, raise_errors
from lite_runner.config.parallel import Cluster, Ranks
from lite_runner.config.sections import Context, Parallel, hccl_timeouts
from lite_runner.errors import ConfigError
from lite_runner.system import environment
from lite_runner.system.environment import VISIBLE, index_of, visible_devices

if TYPE_CHECKING:
    from lite_runner.distributed.rank_table import RankTable


def rank_table_errors(path: str, ranks: Ranks) -> Iterator[Invalid]:
    """Validation errors of the rank table of a job.

    Raises ArtifactError for a file that is missing or no rank table.
    """
    from lite_runner.distributed.rank_table import read_rank_table

    key = "parallel.rank_table_file"
    table = read_rank_table(Path(path))
    if clash := table.clash():
        yield invalid(key, f"{key}: {path} is of no cluster: {clash}")
    if table.ranks != ranks.size:
        yield invalid(
            (key, "parallel", "parallel_config.data_parallel", "parallel_config.model_parallel"),
            f"{key}: {path} has {table.ranks} ranks, expected {ranks.size}:"
            f" data_parallel={ranks.data} times model_parallel={ranks.tensor}",
        )


def with_rank_table(
    parallel: Parallel, context: Context, ranks: Ranks, *, on_ranks: bool, starts: bool
) -> tuple[Parallel, Context]:
    """The sections with the rank table of the environment (RANK_TABLE_FILE, set by Kubernetes
    operators) if the run needs one, and with the device of a table of one rank.

    `on_ranks`: the run mode may be done by several ranks; `starts`: this run is. Raises ConfigError
    if the table is of another job, ArtifactError for a broken one.
    """
    offered = os.environ.get("RANK_TABLE_FILE")
    on_ascend = on_ranks and context.device_target != "CPU" and environment.ascend_devices() > 0
    table = parallel.rank_table_file
    if table is None:
        table = offered if offered and on_ascend and starts else ""
        if offered and on_ranks and not table:
            why = "it is for Ascend" if not on_ascend else "this is one process"
            progress.note(f"RANK_TABLE_FILE={offered} is not used: {why}")
        parallel = replace(parallel, rank_table_file=table)
        if table:
            raise_errors(rank_table_errors(table, ranks))
    if table and on_ascend and not starts:
        from lite_runner.distributed.rank_table import read_rank_table

        device_id = index_of(read_rank_table(Path(table)).device_of(0))
        context = replace(context, device_id=device_id)
    return parallel, context


def variables(
    cluster: Cluster,
    table: RankTable | None,
    hccl_timeout: int,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """HCCL's timeouts, unless the user has set them, and the visible devices.

    The visible devices are those of this machine in the rank table: msrun sets DEVICE_ID to the
    local rank, whatever the table says. Raises ConfigError if the table does not match `cluster`,
    and EnvironmentFault if a device is missing.
    """
    found = hccl_timeouts(hccl_timeout, environ)
    if table is None:
        return found
    table.check_even()
    local = len(table.servers[0].devices)
    if local != cluster.local_worker_num:
        raise ConfigError(
            f"parallel.rank_table_file: has {len(table.servers)} machines of {local} ranks, and"
            f" parallel.local_worker_num={cluster.local_worker_num} are to be started on this one",
            f"parallel.local_worker_num={local}, with parallel.node_rank, master_addr and"
            " master_port; scripts/run_distribute.sh sets them by itself",
        )
    ids = table.servers[cluster.node_rank].device_ids
    return {**found, VISIBLE: visible_devices(ids, environ)}
