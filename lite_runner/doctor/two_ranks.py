"""Ranks on this machine: a port for them to meet at, and two that gather a number from each other.

Each of the two, and their scheduler, runs this file as its program.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lite_runner.backends.collectives import schedule
from lite_runner.config.sections import Cluster, Ranks
from lite_runner.distributed import msrun
from lite_runner.distributed.events import MET, Sender, connect, failure_of
from lite_runner.distributed.job import Limits, run_ranks
from lite_runner.doctor.check import Finding
from lite_runner.errors import RunnerError
from lite_runner.sizing import MSRUN_PROCESS, host_processes
from lite_runner.system import environment, memory
from lite_runner.system.files import readable, temporary_folder

RANKS = 2
LIMIT_S = 90  # for all: two ranks take some ten seconds, of which importing MindSpore is the most
PROGRAM = Path(__file__)


def port() -> Finding:
    """A free port of this machine."""
    return Finding("ok", f"{msrun.choose_port(Cluster(RANKS, RANKS))} is free")


def gather() -> Finding:
    """Start two ranks on the CPU with msrun, which gather a number from each other.

    Neither processes nor files are left behind.
    """
    free, need = memory.free_memory(), MSRUN_PROCESS * host_processes(RANKS, master=True)
    if need > free:
        found = (
            f"not tried: two ranks take {readable(need)} without a model, {readable(free)} is free"
        )
        return Finding("warn", found, remedy="more memory, or fewer other processes")
    with temporary_folder() as folder:
        try:
            run_ranks([str(PROGRAM)], Cluster(RANKS, RANKS), folder, Limits(LIMIT_S, LIMIT_S))
        except RunnerError as error:
            lines = error.message.splitlines()
            # The logs, whose last lines are in the message, go with the folder.
            text = "\n".join(line for line in lines if not line.lstrip().startswith("log: "))
            return Finding("fail", text, remedy=error.hint)
    return Finding("ok", "two ranks connected and gathered a number from each other, on the CPU")


def main() -> int:
    """The part of one rank, or of the scheduler through which they meet."""
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        schedule()
        return 0
    ranks = Ranks(rank=int(os.environ["RANK_ID"]), data=int(os.environ["MS_WORKER_NUM"]))
    sender = connect(ranks.rank)
    assert sender is not None  # distributed/msrun_wrapper.py has connected already
    try:
        _gather(ranks, sender)
        sender.done()
    except Exception as error:
        failure = failure_of(error)
        sender.error(failure)
        os._exit(failure.exit_code)  # MindSpore's finalization would wait for the other rank
    return 0


def _gather(ranks: Ranks, sender: Sender) -> None:
    environment.import_mindspore()
    from lite_runner.backends import collectives
    from lite_runner.backends.mindspore.device import set_device

    set_device("CPU", 0)
    collectives.join(f"rank {ranks.rank} of {ranks.size}")
    sender.stage(MET)
    found = collectives.gather(bytes([ranks.rank]))
    if found != [bytes([rank]) for rank in range(ranks.size)]:
        raise RunnerError(f"gathered {found}, expected the numbers of {ranks.size} ranks")


if __name__ == "__main__":
    sys.exit(main())
