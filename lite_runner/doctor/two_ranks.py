"""Whether several ranks could run here: a port for them to meet at, and two that really start."""

from __future__ import annotations

from pathlib import Path

from lite_runner.config.cluster import Cluster
from lite_runner.distributed import msrun
from lite_runner.distributed.job import Limits, run_ranks
from lite_runner.doctor.check import Finding
from lite_runner.errors import RunnerError
from lite_runner.sizing.need import readable
from lite_runner.sizing.scaling import PROCESS_BYTES, host_processes
from lite_runner.system import memory
from lite_runner.system.files import temporary_folder

RANKS = 2
LIMIT_S = 90  # for all: two ranks take some ten seconds, of which importing MindSpore is the most
PROGRAM = Path(__file__).with_name("rank_program.py")


def port() -> Finding:
    """A free port of this machine."""
    return Finding("ok", f"{msrun.choose_port(Cluster(RANKS, RANKS))} is free")


def gather() -> Finding:
    """Start two ranks on the CPU with msrun, which gather a number from each other.

    Neither processes nor files are left behind.
    """
    free, need = memory.free_memory(), PROCESS_BYTES * host_processes(RANKS, master=True)
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
            told = "\n".join(line for line in lines if not line.lstrip().startswith("log: "))
            return Finding("fail", told, remedy=error.hint)
    return Finding("ok", "two ranks met and gathered a number from each other, on the CPU")
