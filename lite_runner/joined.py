"""A run in a job that another launcher started, such as msrun or a loop over a rank table.

Each process has the same command line and calls `run`. It joins as the rank that its environment
names; the first rank of a machine does what the run's own launcher would do.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lite_runner import progress
from lite_runner.config.cluster import starts_ranks
from lite_runner.config.fields import Note, raise_faults
from lite_runner.config.schema import RunConfig
from lite_runner.distributed.join import schedule
from lite_runner.distributed.member_checks import member_faults
from lite_runner.distributed.membership import Member
from lite_runner.joined_rank import run_rank
from lite_runner.launch import launch
from lite_runner.system import environment
from lite_runner.system.failure import Failure, failure_of


def run(
    config: RunConfig, notes: Sequence[Note], member: Member, plugins: Sequence[str] = ()
) -> int:
    """Do this process's part of the job; the exit code is that of a single process. Ranks that it
    starts import the `plugins`.

    Raises RunnerError before anything is done if `config` cannot be run as `member`.
    """
    progress.configure(config.verbosity)
    if member.is_machine:
        return launch(_on_machine(config, member), notes, plugins)
    raise_faults(list(member_faults(config, member)))
    prints = member.rank in (0, None) and not member.is_scheduler
    alone = member.size == 1 or not starts_ranks(config)
    if config.dry_run or alone:
        return launch(config, notes) if prints else 0
    for note in notes if prints else ():
        progress.note(f"note: {note.text}")
    environment.check_packages()
    if member.is_scheduler:
        schedule()
        return 0
    try:
        run_rank(config, member, notes if prints else ())
    except Exception as error:
        _exit(member, failure_of(error))
    return 0


def _on_machine(config: RunConfig, member: Member) -> RunConfig:
    """The config that starts the ranks of this machine of a cluster."""
    assert member.scheduler is not None and member.rank is not None
    parallel = dataclasses.replace(
        config.parallel,
        worker_num=member.size,
        local_worker_num=member.local_ranks,
        master_addr=member.scheduler.host,
        master_port=member.scheduler.port,
        node_rank=member.rank // member.local_ranks,
    )
    config = dataclasses.replace(config, parallel=parallel)
    raise_faults([*member_faults(config, member)])
    return config


def _exit(member: Member, failure: Failure) -> NoReturn:
    """Report a failure and exit at once: MindSpore's finalization would wait for other ranks."""
    hint = f"\n  -> {failure.hint}" if failure.hint else ""
    text = failure.traceback or failure.message + hint
    print(f"error: {member.name}: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(failure.exit_code)
