"""One rank of a job that another launcher started: joins the others, shares a plan, executes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lite_runner import progress
from lite_runner.config.fields import Note
from lite_runner.config.schema import RunConfig
from lite_runner.distributed.join import join
from lite_runner.distributed.membership import Member
from lite_runner.distributed.rank_device import choose_device
from lite_runner.distributed.rank_progress import RankProgress
from lite_runner.distributed.stopping import STOP_FILE, StopFlags, stop_or_exit_on_ctrl_c
from lite_runner.launch import log_details
from lite_runner.shared_plan import execute_as_rank, share_plan
from lite_runner.system.signals import CutShort


def run_rank(config: RunConfig, member: Member, notes: Sequence[Note]) -> None:
    """Do the work of the rank that this process is. Raises RunnerError, and KeyboardInterrupt
    where Ctrl-C ended the generation."""
    device = choose_device(config, member)
    progress.redirect(RankProgress(-1 if member.rank is None else member.rank, None))
    with progress.step(f"meet the {member.size} ranks"):
        parallel = config.parallel
        joined = join(
            member,
            device.meets_on,
            device.device_id,
            parallel.rendezvous_timeout,
            parallel.hccl_timeout,
        )
    progress.redirect(RankProgress(joined.rank, None))
    plan, folder = share_plan(config, joined)
    cut_short = False
    with folder:
        folder.open_log(f"rank_{joined.rank}.log")
        log_details(notes)
        plan = dataclasses.replace(plan, config=device.in_config(plan.config))
        alone = len(joined.local_ranks) == joined.size  # no other machine
        flags = StopFlags(joined.lock.folder / STOP_FILE) if alone else None
        with stop_or_exit_on_ctrl_c(flags):
            try:
                execute_as_rank(plan.of_rank(joined.rank), folder, flags)
            except CutShort:
                from lite_runner.backends.collectives import gather

                gather(b"")  # rank 0 may still write, and msrun kills all when one exits with 130
                cut_short = True
    joined.lock.mark_done()
    joined.lock.stop_watching()
    if cut_short:
        raise KeyboardInterrupt
