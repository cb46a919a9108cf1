"""This process's place in a job that another launcher started, read from its environment.

Three kinds of launchers set variables (MindSpore's documents and ascend-operator's source):
- msrun, and any that builds MindSpore's dynamic cluster: MS_ROLE (MS_SCHED or MS_WORKER),
  MS_WORKER_NUM, MS_SCHED_HOST, MS_SCHED_PORT, and for a worker MS_NODE_ID and RANK_ID, unless
  the rank is assigned at the rendezvous;
- loops over a rank table: RANK_TABLE_FILE, RANK_ID, RANK_SIZE, DEVICE_ID, without a scheduler;
- ascend-operator, for each container: those of the dynamic cluster, and MS_LOCAL_WORKER and
  MS_NODE_RANK in place of a rank: a container with one device is a rank, one with more a machine
  that starts its ranks.
Without MS_ROLE or RANK_ID a process is in no job; the other variables may be left over, and so may
a RANK_ID alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lite_runner.config import Invalid, raise_errors
from lite_runner.config.parallel import TABLE_VARIABLE, started_by_launcher
from lite_runner.config.sections import Parallel, Ranks
from lite_runner.errors import EnvironmentFault
from lite_runner.records import dataclass
from lite_runner.system.environment import index_of


@dataclass(frozen=True)
class Address:
    """The address of a dynamic cluster's scheduler."""

    host: str
    port: int


@dataclass(frozen=True)
class Member:
    """A rank of a job, its scheduler, or a machine that starts several ranks."""

    size: int  # ranks of the job
    rank: int | None = None  # None: assigned at the rendezvous; of a machine: its first rank
    is_scheduler: bool = False
    local_ranks: int = 1  # more than 1: a machine that starts them
    scheduler: Address | None = None  # None: ranks of a rank table
    table: Path | None = None  # with a scheduler: not read yet
    device_id: int | None = None  # DEVICE_ID

    @property
    def is_machine(self) -> bool:
        """True for a process that is not a rank, but starts those of its machine."""
        return self.local_ranks > 1

    @property
    def prints(self) -> bool:
        """True for the one process that prints and writes results, as far as that is known."""
        return self.is_machine or (self.rank in (0, None) and not self.is_scheduler)

    def parallel_here(self, parallel: Parallel) -> Parallel:
        """The section for starting the ranks of a machine."""
        assert self.scheduler is not None and self.rank is not None
        return replace(
            parallel,
            worker_num=self.size,
            local_worker_num=self.local_ranks,
            master_addr=self.scheduler.host,
            master_port=self.scheduler.port,
            node_rank=self.rank // self.local_ranks,
        )

    @property
    def name(self) -> str:
        """For messages, e.g. `rank 1 of 2`."""
        if self.is_scheduler:
            return f"the scheduler of {self.size} ranks"
        if self.is_machine:
            return f"a machine with {self.local_ranks} of {self.size} ranks"
        return f"{'a rank' if self.rank is None else f'rank {self.rank}'} of {self.size}"


def membership(environ: Mapping[str, str] = os.environ) -> Member | None:
    """This process's place in a job that another launcher started; None if it is in no job.

    Raises EnvironmentFault for variables that are missing or contradict each other, and
    ArtifactError for a broken rank table.
    """
    if not started_by_launcher(environ):
        return None
    if "MS_ROLE" in environ:
        return _of_cluster(environ)
    size = _number(environ, "RANK_SIZE") if "RANK_SIZE" in environ else None
    if TABLE_VARIABLE not in environ:
        raise _incomplete(["RANK_ID", "RANK_SIZE"], [TABLE_VARIABLE])
    return _of_table(environ, size)


def _of_cluster(environ: Mapping[str, str]) -> Member:
    role = environ["MS_ROLE"]
    if role not in ("MS_SCHED", "MS_WORKER"):
        raise EnvironmentFault(
            f"MS_ROLE: got {role!r}, expected MS_SCHED or MS_WORKER", "start the job with msrun"
        )
    wanted = ("MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT")
    if missing := [name for name in wanted if not environ.get(name)]:
        raise _incomplete(["MS_ROLE"], missing)
    member = Member(
        size=_number(environ, "MS_WORKER_NUM", 1),
        is_scheduler=role == "MS_SCHED",
        scheduler=Address(environ["MS_SCHED_HOST"], _number(environ, "MS_SCHED_PORT", 1)),
        table=_table_file(environ),
        device_id=_number(environ, "DEVICE_ID") if "DEVICE_ID" in environ else None,
    )
    if member.is_scheduler:
        return replace(member, table=None)
    if "MS_NODE_ID" in environ or "RANK_ID" in environ:
        rank = _number(environ, "MS_NODE_ID" if "MS_NODE_ID" in environ else "RANK_ID")
        return _checked(replace(member, rank=rank))
    if "MS_LOCAL_WORKER" not in environ:
        return member
    if "MS_NODE_RANK" not in environ:
        raise _incomplete(["MS_LOCAL_WORKER"], ["MS_NODE_RANK"])
    local = _number(environ, "MS_LOCAL_WORKER", 1)
    if member.size % local:
        raise EnvironmentFault(
            f"MS_LOCAL_WORKER: got {local}, expected a divisor of MS_WORKER_NUM={member.size}"
        )
    rank = _number(environ, "MS_NODE_RANK") * local
    return _checked(replace(member, rank=rank, local_ranks=local))


def _of_table(environ: Mapping[str, str], size: int | None) -> Member:
    from lite_runner.distributed.rank_table import read_rank_table

    path = _table_file(environ)
    assert path is not None
    ranks = read_rank_table(path).ranks
    if size not in (None, ranks):
        raise EnvironmentFault(
            f"RANK_SIZE: got {size}, but {path} has {ranks} ranks",
            "give the rank table of this job: scripts/hccl_tools.py --device_num writes one",
        )
    device = _number(environ, "DEVICE_ID") if "DEVICE_ID" in environ else None
    return _checked(Member(ranks, _number(environ, "RANK_ID"), table=path, device_id=device))


def _table_file(environ: Mapping[str, str]) -> Path | None:
    path = environ.get(TABLE_VARIABLE)
    return Path(path).expanduser().absolute() if path else None


def device_of(member: Member, environ: Mapping[str, str] = os.environ) -> int | None:
    """The index of a rank's Ascend device; None if neither table nor DEVICE_ID gives it.

    Raises EnvironmentFault if the rank table is of another job, or its device is missing, and
    ArtifactError for a broken table.
    """
    from lite_runner.distributed.rank_table import read_rank_table

    by_hand = member.scheduler is None and member.device_id is not None  # not msrun's local rank
    if member.table is None or member.rank is None or by_hand:
        return member.device_id
    table = read_rank_table(member.table)
    if table.ranks != member.size:
        raise EnvironmentFault(
            f"RANK_TABLE_FILE: {member.table} has {table.ranks} ranks, and this is {member.name}",
            "give the rank table of this job, or unset RANK_TABLE_FILE: devices as numbered",
        )
    return index_of(table.device_of(member.rank), environ)


def _checked(member: Member) -> Member:
    assert member.rank is not None
    if member.rank >= member.size:
        raise EnvironmentFault(
            f"the environment says that this is rank {member.rank} of {member.size}: expected a"
            f" rank below {member.size}"
        )
    return member


def _number(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal() and least <= int(text) < 1 << 31):
        raise EnvironmentFault(f"{name}: got {text!r}, expected a number from {least}")
    return int(text)


def _incomplete(given: Sequence[str], missing: Sequence[str]) -> EnvironmentFault:
    return EnvironmentFault(
        f"{' and '.join(given)} {_is(given)} set, as for a process of a job of several ranks, but"
        f" {' and '.join(missing)} {_is(missing)} not",
        "start the job with msrun or scripts/msrun_launcher.sh, which set all of them; for a run"
        f" in one process: unset {' '.join(given)}",
    )


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def check_member(
    member: Member, ranks: Ranks, run_mode: str, *, on_ranks: bool, use_parallel: bool
) -> None:
    """Raises ConfigError where others than the `ranks` of a run were started; `on_ranks`: its run
    mode may be done by several."""
    if not on_ranks and member.size > 1:
        key, text = "run_mode", f"but run_mode={run_mode} runs in one process"
    elif member.size == ranks.size:
        return
    elif not use_parallel:
        key = "use_parallel"
        text = (
            "but use_parallel=false: each would do the whole job; use_parallel=true with"
            f" parallel_config.model_parallel={member.size}, or start one process"
        )
    else:
        key = "parallel_config"
        text = (
            f"expected {ranks.size}: data_parallel={ranks.data} * model_parallel={ranks.tensor} of"
            f" parallel_config; start {ranks.size}, or set"
            f" parallel_config.model_parallel={member.size} and parallel_config.data_parallel=1"
        )
    raise_errors([Invalid((key,), f"this process was started as {member.name}, {text}")])
