"""Joining the other ranks: the collectives' rendezvous, and the ranks of this machine."""

from __future__ import annotations

import os
import socket
import sys

from lite_runner import progress
from lite_runner.config.hccl import timeouts
from lite_runner.config.ranks import Ranks
from lite_runner.distributed import msrun_scheduler
from lite_runner.distributed.events import MET
from lite_runner.distributed.liveness import RankLock
from lite_runner.distributed.membership import Member
from lite_runner.errors import EXIT_FAILED
from lite_runner.records import dataclass
from lite_runner.system import environment


@dataclass(frozen=True)
class Joined:
    """This process as a rank of a job that another launcher started; all ranks have joined."""

    rank: int
    size: int
    local_ranks: tuple[int, ...]  # on this machine
    lock: RankLock

    @property
    def leads(self) -> bool:
        """Whether this rank does what one process of the machine must do for all."""
        return self.rank == self.local_ranks[0]


def join(member: Member, device: str, device_id: int, timeout: int, hccl_timeout: int) -> Joined:
    """Join the other ranks, within `timeout` s unless the environment sets another; once a process.

    If a rank of this machine ends before its work is done, this process ends too. Raises
    EnvironmentFault.
    """
    os.environ.setdefault("MS_TOPO_TIMEOUT", str(timeout))
    if device == "Ascend":
        os.environ.update(timeouts(hccl_timeout))
    lock = None
    if member.scheduler is None:
        assert member.table is not None and member.rank is not None
        lock = RankLock(str(member.table), member.rank)
        if device == "CPU":
            _find_scheduler(member, lock, timeout)
    elif member.rank is not None:  # in a container neither is set
        os.environ.update(MS_NODE_ID=str(member.rank), RANK_ID=str(member.rank))
    _set_device(device, device_id)
    from lite_runner.backends import collectives

    rank, size = collectives.join(member.name)
    os.environ.update(RANK_ID=str(rank), DEVICE_ID=str(device_id))  # where unset so far
    if lock is None:
        assert member.scheduler is not None
        lock = RankLock(f"{member.scheduler.host}:{member.scheduler.port}", rank)
    hosts = collectives.gather(socket.gethostname().encode())
    local_ranks = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
    lock.write("")  # the scheduler's port is no longer needed
    lock.watch((other for other in local_ranks if other != rank), _exit)
    return Joined(rank, size, local_ranks, lock)


def meet(device: str, device_id: int, ranks: Ranks) -> None:
    """Join the other ranks, as `ranks` in a job that our own launcher started. Raises
    EnvironmentFault."""
    with progress.step(f"meet the {ranks.size} ranks"):
        _set_device(device, device_id)
        from lite_runner.backends import collectives

        collectives.meet(ranks)
    progress.status(MET)


def schedule() -> None:
    """Run the job's scheduler until all ranks have left."""
    environment.import_mindspore()
    from lite_runner.backends import collectives

    collectives.schedule()


def _set_device(device: str, device_id: int) -> None:
    environment.import_mindspore()
    from lite_runner.backends.device import set_device

    set_device(device, device_id)


def _find_scheduler(member: Member, lock: RankLock, timeout: int) -> None:
    """Set the environment variables of a dynamic cluster, which a loop over a rank table lacks."""
    if member.rank == 0:
        port = msrun_scheduler.start(lock.folder, member.size, timeout)
        lock.write(str(port))
    else:
        port = lock.wait_for_port(timeout)
    os.environ.update(
        MS_ROLE="MS_WORKER",
        MS_WORKER_NUM=str(member.size),
        MS_SCHED_HOST=msrun_scheduler.HOST,
        MS_SCHED_PORT=str(port),
        MS_NODE_ID=str(member.rank),
    )


def _exit(rank: int) -> None:
    """Exit at once: a collective would wait for the lost `rank` forever."""
    text = f"error: rank {rank} has ended before its work was done; see its messages"
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)
