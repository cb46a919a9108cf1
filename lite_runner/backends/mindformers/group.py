"""Workers that share a model: the environment of each, and the scheduler through which they meet.

MindSpore's releases do not talk with one another, so the scheduler runs in the workers' Python.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from lite_runner.backends.workers.process import WorkerProcess
from lite_runner.backends.workers.python import WorkerPython, worker_command
from lite_runner.records import dataclass
from lite_runner.system.ascend_devices import VISIBLE

HOST = "127.0.0.1"  # they are on one machine
SCRIPT = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class WorkerGroup:
    """The workers that share a model, all on this machine."""

    size: int
    port: int  # of their scheduler
    timeout: int  # seconds until all have joined
    devices: Sequence[int] = ()  # of the workers, as ASCEND_RT_VISIBLE_DEVICES has them
    more: Mapping[str, str] = field(default_factory=dict)  # variables: HCCL's timeouts

    @property
    def scheduler_variables(self) -> dict[str, str]:
        """The environment of the scheduler."""
        return {
            "MS_ROLE": "MS_SCHED",
            "MS_WORKER_NUM": str(self.size),
            "MS_SCHED_HOST": HOST,
            "MS_SCHED_PORT": str(self.port),
            "MS_TOPO_TIMEOUT": str(self.timeout),
        }

    def variables(self, rank: int) -> dict[str, str]:
        """The environment of a worker. In a dynamic cluster MindSpore takes the device of the local
        rank among those that are visible, whatever DEVICE_ID says."""
        place = str(rank)
        visible = {VISIBLE: ",".join(map(str, sorted(self.devices)))} if self.devices else {}
        return {
            **self.scheduler_variables,
            **self.more,
            **visible,
            "MS_ROLE": "MS_WORKER",
            "MS_NODE_ID": place,
            "RANK_ID": place,
            "RANK_SIZE": str(self.size),
            "DEVICE_ID": place,
        }


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's place in its group."""

    group: WorkerGroup
    rank: int
    scheduler: WorkerProcess | None = None  # that of the group, if it is this process's

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the worker."""
        return self.group.variables(self.rank)


def free_port() -> int:
    """A port for a scheduler, which nothing uses now."""
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def start_scheduler(own: WorkerPython, python: Path, group: WorkerGroup) -> WorkerProcess:
    """The scheduler of a group, a process of `python`, that of the product `own`; it answers once
    all have joined, and schedules until it is closed. Raises EnvironmentFault."""
    named = replace(own, product=f"the scheduler of {own.product}'s workers")
    process = WorkerProcess(
        named, worker_command(python, SCRIPT), variables=group.scheduler_variables
    )
    process.begin({"op": "schedule"})
    return process
