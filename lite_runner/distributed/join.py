"""Joining a job that another launcher started: the rendezvous, and the ranks of this machine."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from lite_runner.config.hccl import timeouts
from lite_runner.distributed import msrun_scheduler
from lite_runner.distributed.membership import Member
from lite_runner.distributed.rendezvous import MeetingPlace
from lite_runner.errors import EXIT_FAILED
from lite_runner.system import environment


@dataclass(frozen=True)
class Joined:
    """This process as a rank among others, which are all there."""

    rank: int
    size: int
    here: tuple[int, ...]  # the ranks on this machine
    place: MeetingPlace

    @property
    def leads(self) -> bool:
        """Whether this rank does for its machine what one process is to do."""
        return self.rank == self.here[0]


def join(member: Member, device: str, device_id: int, timeout: int, hccl_timeout: int) -> Joined:
    """Join the other ranks, within `timeout` s unless the environment sets another; once a process.

    When one of this machine's ranks is gone before its work is done, this process ends too.
    Raises EnvironmentFault.
    """
    os.environ.setdefault("MS_TOPO_TIMEOUT", str(timeout))
    if device == "Ascend":
        os.environ.update(timeouts(hccl_timeout))
    place = None
    if member.scheduler is None:
        assert member.table is not None and member.rank is not None
        place = MeetingPlace(str(member.table), member.rank)
        if device == "CPU":
            _find_scheduler(member, place, timeout)
    elif member.rank is not None:  # a container's rank has neither
        os.environ.update(MS_NODE_ID=str(member.rank), RANK_ID=str(member.rank))
    environment.import_mindspore()
    from lite_runner.backends import collectives
    from lite_runner.backends.device import set_device

    set_device(device, device_id)
    rank, size = collectives.join(member.name)
    os.environ.update(RANK_ID=str(rank), DEVICE_ID=str(device_id))  # where nobody has said so
    if place is None:
        assert member.scheduler is not None
        place = MeetingPlace(f"{member.scheduler.host}:{member.scheduler.port}", rank)
    hosts = collectives.gather(socket.gethostname().encode())
    here = tuple(other for other, host in enumerate(hosts) if host == hosts[rank])
    place.say("")  # the scheduler's port is of no use any more
    place.watch((other for other in here if other != rank), _leave)
    return Joined(rank, size, here, place)


def _find_scheduler(member: Member, place: MeetingPlace, timeout: int) -> None:
    """Put the dynamic cluster into the environment that a loop over a rank table lacks."""
    if member.rank == 0:
        port = msrun_scheduler.start(place.folder, member.size, timeout)
        place.say(str(port))
    else:
        port = place.wait_for_port(timeout)
    os.environ.update(
        MS_ROLE="MS_WORKER",
        MS_WORKER_NUM=str(member.size),
        MS_SCHED_HOST=msrun_scheduler.HOST,
        MS_SCHED_PORT=str(port),
        MS_NODE_ID=str(member.rank),
    )


def schedule() -> None:
    """Be the job's scheduler until its ranks have left."""
    environment.import_mindspore()
    from lite_runner.backends import collectives

    collectives.schedule()


def _leave(rank: int) -> None:
    """End where a lost `rank` would be waited for."""
    text = f"error: rank {rank} has ended before its work was done; see its messages"
    print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)
