"""Environment variables of the ranks of a machine for Ascend, besides those of msrun."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lite_runner.config.cluster import Cluster
from lite_runner.config.hccl import timeouts
from lite_runner.distributed.rank_table import RankTable
from lite_runner.errors import ConfigError
from lite_runner.system.ascend_devices import VISIBLE, visible_devices


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
    found = timeouts(hccl_timeout, environ)
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
