"""A process of a job of several ranks, started by msrun, a loop over a rank table, or the launcher
of a run (launch.py).

Each process has the same command line and calls `run`. It joins as the rank that its environment
names; the first rank of a machine resolves the run for the others there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from lite_runner import profiler, progress
from lite_runner.backends.collectives import gather, schedule
from lite_runner.backends.mindspore.device import choose_device
from lite_runner.config import Note
from lite_runner.config.compose import portable
from lite_runner.config.parallel import SOCKET_VARIABLE
from lite_runner.config.prompts import completed
from lite_runner.config.schema import RunConfig
from lite_runner.config.sections import AscendSettings, Context
from lite_runner.distributed.events import (
    FOLDER_VARIABLE,
    MET,
    RankProgress,
    Sender,
    connect,
    failure_of,
)
from lite_runner.distributed.join import Joined, join
from lite_runner.distributed.membership import Member, device_of
from lite_runner.distributed.stopping import (
    STOP_FILE,
    StopCondition,
    StopFlags,
    stop_or_exit_on_ctrl_c,
)
from lite_runner.launch import log_details, operators_profiled, run_folder, write_ranks_profile
from lite_runner.output import RunFolder
from lite_runner.plan import Plan
from lite_runner.plan.resources import check_ranks_fit
from lite_runner.run_modes import from_dict, run_mode
from lite_runner.system import environment
from lite_runner.system.signals import CutShort, Terminated


def run(config: RunConfig, notes: Sequence[Note], member: Member) -> None:
    """Do the part of the rank, or scheduler, that this process is. Ends the process where it
    fails, or Ctrl-C ended a generation."""
    sender = None if member.rank is None else connect(member.rank)
    if not member.prints or sender is not None:  # the launcher has shown them
        notes = ()
    for note in notes:
        progress.note(f"note: {note.text}")
    environment.check_packages()
    if member.is_scheduler:
        schedule()
        return
    try:
        _run_rank(config, member, notes, sender)
    except (Exception, KeyboardInterrupt, Terminated) as error:
        _exit(member, error, sender)


def _run_rank(
    config: RunConfig, member: Member, notes: Sequence[Note], sender: Sender | None
) -> None:
    """Do the work of the rank that this process is; `sender` goes to the launcher of the run, if
    it has one. Raises RunnerError, and KeyboardInterrupt where Ctrl-C ended a generation."""
    progress.redirect(RankProgress(-1 if member.rank is None else member.rank, sender))
    if config.profile:
        events = profiler.MOST_EVENTS // member.size
        profiler.start(whole_process=True, most_events=events)
    with ExitStack() as stack:
        folder = None
        if sender is not None:
            folder = RunFolder(Path(os.environ[FOLDER_VARIABLE]))
            stack.enter_context(folder).open_log(f"rank_{sender.rank}.log")
        target, device_id, meets_on = own_device(
            config.context, member, elsewhere=config.in_mindformers
        )
        with progress.step(f"join the {member.size} ranks", phase="meet"):
            joined = join(
                member,
                meets_on,
                device_id,
                config.parallel.rendezvous_timeout,
                config.parallel.hccl_timeout,
                launched=sender is not None,
            )
        progress.status(MET)
        # The launcher has planned the run as well, and shown its notes.
        progress.redirect(RankProgress(joined.rank if sender is None else -1, sender))
        with profiler.phase("plan"):
            plan, path = _share_plan(config, joined)
        progress.redirect(RankProgress(joined.rank, sender))
        if folder is None:
            folder = RunFolder(path)
            stack.enter_context(folder).open_log(f"rank_{joined.rank}.log")
        log_details(notes)
        asked, threads = plan.config.context, plan.config.context.threads
        if target == "CPU" and threads is None:  # its share of this machine's processors
            threads = environment.cores(len(joined.local_ranks))
        context = dataclasses.replace(asked, device_id=device_id, threads=threads)
        if joined.leads and sender is None:
            note = environment.threads_beyond(asked.threads, plan.config.processes_here)
            if note:
                progress.note(f"note: {note}")
        plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, context=context))
        cut_short = _execute(plan.of_rank(joined.rank), folder, joined)
    if sender is not None:
        sender.done()
        return
    assert joined.lock is not None
    joined.lock.mark_done()
    joined.lock.stop_watching()
    if cut_short:
        raise KeyboardInterrupt


def _share_plan(config: RunConfig, joined: Joined) -> tuple[Plan, Path]:
    """The plan and the run folder, made by the first rank of this machine for all of them: prompts
    are read, tokenized and checked once, and the shards of a checkpoint verified. Every rank calls
    it. Raises RunnerError."""
    if joined.leads:
        local = dataclasses.replace(config.parallel, local_worker_num=len(joined.local_ranks))
        config = dataclasses.replace(config, parallel=local)
        config = completed(config, draws_seed=joined.rank == 0)
    seeds = json.dumps([config.seed, config.weights_seed]).encode()
    seed, weights_seed = json.loads(gather(seeds)[0])  # rank 0's, on all machines
    mode, shared = run_mode(config.run_mode), dict[str, Any]()
    if joined.leads:
        config = dataclasses.replace(config, seed=seed, weights_seed=weights_seed)
        config = config.from_dict(portable(config))  # ranks may be in other folders
        plan = mode.plan(config)
        if joined.lock is not None:  # a launcher has done it while no rank held memory yet
            check_ranks_fit(plan)
        plan = plan.verified(joined.local_ranks)
        shared = {"config": plan.config.to_dict(), "tokens": plan.job and plan.job.tokens}
        if joined.lock is not None:
            folder = run_folder(config)
            StopFlags.create(joined.lock.folder / STOP_FILE, joined.size)
            shared["folder"] = str(folder.path)
    shared = json.loads(gather(json.dumps(shared).encode())[joined.local_ranks[0]])
    if not joined.leads:
        tokens = [shared["tokens"]] if shared["tokens"] else []
        plan = mode.plan(from_dict(shared["config"]), *tokens).verified(())
    return plan, Path(shared.get("folder", ""))


def _execute(plan: Plan, folder: RunFolder, joined: Joined) -> bool:
    """True where Ctrl-C ended the generation; results have been written. Raises RunnerError."""
    flags, cut_short = _stop_flags(joined), False
    stop = StopCondition(flags, plan.ranks)
    with stop_or_exit_on_ctrl_c(flags):
        try:
            with operators_profiled(plan.config.backend, folder.path):
                run_mode(plan.config.run_mode).run(plan, folder, stop.reached)
        except CutShort:
            cut_short = True
        if plan.config.profile:
            write_ranks_profile(folder, joined, in_haste=cut_short)
        if cut_short:
            gather(b"")  # rank 0 may still write, and msrun kills all when one exits with 130
    return cut_short


def _stop_flags(joined: Joined) -> StopFlags | None:
    """The flags of the ranks of a machine; None if the job has other machines too."""
    if joined.lock is None:
        path = Path(os.environ[SOCKET_VARIABLE]).with_name(STOP_FILE)
        return StopFlags(path) if path.exists() else None
    alone = len(joined.local_ranks) == joined.size
    return StopFlags(joined.lock.folder / STOP_FILE) if alone else None


def _exit(member: Member, error: BaseException, sender: Sender | None) -> NoReturn:
    """Report a failure and exit at once: MindSpore's finalization would wait for other ranks, and
    crashes now and then beside its own connections to those that end."""
    failure = failure_of(error)
    if sender is not None:
        sender.error(failure)
    hint = f"\n  -> {failure.hint}" if failure.hint else ""
    text = failure.traceback or failure.message + hint
    if sender is None and not isinstance(error, Exception):
        progress.error(text)  # as one process says it
    else:
        print(f"error: {member.name}: {text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.exit_code)


def own_device(context: Context, member: Member, *, elsewhere: bool) -> tuple[str, int, str]:
    """The kind, "CPU" or "Ascend", and the id of the device of this process as `member`, and the
    kind on which it meets the other ranks: the CPU where it computes `elsewhere`; chooses its
    Ascend settings, too.

    Call it before MindSpore is imported. Raises RunnerError: no such device, a broken rank table.
    """
    target = choose_device(context.device_target, AscendSettings.of(context))
    device_id = context.device_id
    if target == "Ascend" and (own := device_of(member)) is not None:
        device_id = own
    return target, device_id, "CPU" if elsewhere else target
