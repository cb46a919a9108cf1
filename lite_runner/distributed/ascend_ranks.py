"""Ranks on Ascend: the rank table of a run, its validation, and the environment of its ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from lite_runner import progress
from lite_runner.config.fields import Fault, fault, raise_faults
from lite_runner.config.parallel import Cluster, starts_ranks, without_ranks
from lite_runner.config.schema import RunConfig
from lite_runner.config.sections import hccl_timeouts
from lite_runner.distributed.rank_table import RankTable, read_rank_table
from lite_runner.errors import ConfigError
from lite_runner.system import environment
from lite_runner.system.ascend_devices import VISIBLE, index_of, visible_devices


def rank_table_faults(config: RunConfig) -> Iterator[Fault]:
    """Validation errors of the config's rank table.

    Raises ArtifactError for a file that is missing or no rank table.
    """
    path, ranks = config.parallel.rank_table_file, config.parallel_config
    key = "parallel.rank_table_file"
    if not path:
        return
    if not config.use_parallel:
        yield fault((key, "use_parallel"), f"{key} {without_ranks(config)}")
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
        device_id = index_of(read_rank_table(Path(table)).device_of(0))
        config = replace(config, context=replace(config.context, device_id=device_id))
    return config


def _is_ascend(config: RunConfig) -> bool:
    return config.context.device_target != "CPU" and environment.ascend_devices() > 0


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
