"""Which ranks of a job this machine starts, and where they meet: the section `parallel`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from lite_runner.config.fields import Fault
from lite_runner.config.options import SaveStrategyOptions
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.records import dataclass


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job over machines (nodes) with the same number of ranks each."""

    worker_num: int  # ranks on all machines
    local_worker_num: int  # ranks on this one
    master_addr: str = "127.0.0.1"  # the machine with node_rank 0
    master_port: int | None = None  # None: a free one of this machine
    node_rank: int = 0

    @property
    def local_ranks(self) -> range:
        """The ranks that this machine starts."""
        first = self.node_rank * self.local_worker_num
        return range(first, first + self.local_worker_num)

    @property
    def is_master(self) -> bool:
        """Whether rank 0, which prints and writes the results, is on this machine."""
        return self.node_rank == 0


def ranks_of(config: RunConfig) -> Ranks:
    """How the config divides the job, seen from rank 0; one rank with use_parallel=false."""
    if not config.use_parallel:
        return Ranks()
    asked = config.parallel_config
    return Ranks(data=asked.data_parallel, tensor=asked.model_parallel)


def cluster_of(config: RunConfig) -> Cluster:
    """The ranks of a config that passed `cluster_faults`."""
    parallel, size = config.parallel, ranks_of(config).size
    return Cluster(
        worker_num=size,
        local_worker_num=parallel.local_worker_num or size,
        master_addr=parallel.master_addr,
        master_port=parallel.master_port,
        node_rank=parallel.node_rank,
    )


def starts_ranks(config: RunConfig) -> bool:
    """Whether several ranks do the work."""
    several = config.on_ranks and ranks_of(config).size > 1
    alone = isinstance(config, SaveStrategyOptions) and config.only_save_strategy
    return several and not alone


def placed(config: RunConfig, device: str, device_id: int) -> RunConfig:
    """The config with this rank's device and, on CPU, its share of this machine's processors."""
    context = replace(config.context, device_id=device_id)
    if device == "CPU" and context.threads is None:
        processors = len(os.sched_getaffinity(0))
        context = replace(
            context, threads=max(1, processors // cluster_of(config).local_worker_num)
        )
    return replace(config, context=context)


def cluster_faults(config: RunConfig) -> Iterator[Fault]:
    """Validation errors of the numbers of ranks and machines."""
    parallel = config.parallel
    given = {
        "worker_num": parallel.worker_num,
        "local_worker_num": parallel.local_worker_num,
        "master_port": parallel.master_port,
        "node_rank": parallel.node_rank,
        "log_dir": parallel.log_dir,
        "timeout": parallel.timeout,
    }
    if not config.use_parallel:
        for name, value in given.items():
            if value:
                yield _fault(name, f"={value} has an effect only with use_parallel=true")
        return
    size = ranks_of(config).size
    asked = config.parallel_config
    if parallel.worker_num not in (None, size):
        yield _fault(
            "worker_num",
            f": got {parallel.worker_num}, expected data_parallel={asked.data_parallel}"
            f" * model_parallel={asked.model_parallel} = {size}",
        )
        return
    local = parallel.local_worker_num or size
    if size % local:
        yield _fault(
            "local_worker_num",
            f": got {local}, expected a divisor of the {size} ranks: every machine has as many",
        )
        return
    if parallel.node_rank >= size // local:
        machines = "the only machine" if size == local else f"{size // local} machines"
        yield _fault(
            "node_rank",
            f": got {parallel.node_rank}, expected less than {size // local}: {size} ranks with"
            f" local_worker_num={local} are {machines}",
        )
    elif local < size and parallel.master_port is None:
        yield _fault(
            "master_port",
            f" is missing: {size // local} machines must agree on one, e.g."
            " parallel.master_port=8118",
        )


def _fault(name: str, text: str) -> Fault:
    return Fault((f"parallel.{name}", "use_parallel", "parallel"), f"parallel.{name}{text}")
