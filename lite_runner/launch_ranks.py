"""Starting the ranks of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lite_runner.config.cluster import cluster_of
from lite_runner.config.repeat import kept
from lite_runner.config.schema import RunConfig
from lite_runner.distributed import ascend_ranks
from lite_runner.distributed.job import Limits, run_ranks
from lite_runner.distributed.rank_table_file import read_rank_table
from lite_runner.output.report import RunFolder
from lite_runner.shared_plan import plan_for_ranks, plan_text
from lite_runner.system import environment
from lite_runner.system.files import memory_file

EXIT_S = 20.0  # for ranks that are done to exit by themselves
RANK_PROGRAM = Path(__file__).with_name("rank.py")


def launch_ranks(config: RunConfig, folder: RunFolder, plugins: Sequence[str]) -> None:
    """Run the ranks of this machine, which read their plan from the memory of this process.

    Raises RunnerError, and KeyboardInterrupt.
    """
    cluster, parallel = cluster_of(config), config.parallel
    on_ascend = environment.resolve_device(config.context.device_target) == "Ascend"
    table = (parallel.rank_table_file if on_ascend else "") or ""
    variables = {}
    if on_ascend:
        rank_table = read_rank_table(Path(table)) if table else None
        variables = ascend_ranks.variables(cluster, rank_table, parallel.hccl_timeout)
    plan = plan_for_ranks(config).verified(cluster.local_ranks)
    folder.write_config(kept(plan.config.without_secrets()))
    # Devices must be released, and other machines use the scheduler; on CPU nothing is left.
    exit_s = EXIT_S if on_ascend or cluster.local_worker_num < cluster.worker_num else 0.0
    with memory_file("plan", plan_text(plan).encode()) as plan_file:
        run_ranks(
            [
                str(RANK_PROGRAM),
                str(plan_file),
                str(folder.path),
                *map(_absolute, plugins),
            ],
            cluster,
            folder.path,
            Limits(parallel.rendezvous_timeout, parallel.timeout, exit_s),
            log_dir=Path(_absolute(parallel.log_dir)) if parallel.log_dir else None,
            rank_table_file=table,
            ascend=variables,
        )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
