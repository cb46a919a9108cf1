"""A run in a job that another launcher started, such as msrun or a loop over a rank table.

Each process has the same command line and calls `run`. It joins as the rank that its environment
names; the first rank of a machine does what the run's own launcher would do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lite_runner import progress
from lite_runner.backends import ascend_context
from lite_runner.config.ascend import AscendSettings
from lite_runner.config.cluster import placed, starts_ranks
from lite_runner.config.fields import Note, raise_faults
from lite_runner.config.repeat import kept
from lite_runner.config.schema import RunConfig
from lite_runner.config.seeds import with_seed
from lite_runner.distributed.join import Joined, join, schedule
from lite_runner.distributed.member_checks import member_faults
from lite_runner.distributed.membership import Member, device_of
from lite_runner.distributed.outlet import Outlet
from lite_runner.distributed.stopping import BOARD, STOP_S, Board, CommonStop
from lite_runner.errors import EXIT_FAILED, EXIT_INTERRUPTED, RunnerError
from lite_runner.launch import launch, log_details, plan_for_ranks
from lite_runner.output.report import RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.run_modes import from_dict, run_mode
from lite_runner.system import environment, memory
from lite_runner.system.signals import CutShort, offered


def run(
    config: RunConfig, notes: Sequence[Note], member: Member, plugins: Sequence[str] = ()
) -> int:
    """Do this process's part of the job; the exit code is that of a single process. Ranks that it
    starts import the `plugins`.

    Raises RunnerError before anything is done where `config` cannot be run as `member`.
    """
    progress.configure(config.verbosity)
    if member.is_machine:
        return launch(_on_machine(config, member), notes, plugins)
    raise_faults(list(member_faults(config, member)))
    speaks = member.rank in (0, None) and not member.is_scheduler
    alone = member.size == 1 or not starts_ranks(config)
    if config.dry_run or alone:
        return launch(config, notes) if speaks else 0
    for note in notes if speaks else ():
        progress.note(f"note: {note.text}")
    environment.check_packages()
    if member.is_scheduler:
        schedule()
        return 0
    try:
        return _join(config, member, notes if speaks else ())
    except RunnerError as error:
        return _leave(f"error: {member.name}: {error}", error.exit_code)
    except Exception as error:
        lacking = memory.fault_of(error)
        if lacking is not None:
            return _leave(f"error: {member.name}: {lacking}", lacking.exit_code)
        return _leave(f"error: {member.name}: {traceback.format_exc()}", EXIT_FAILED)


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


def _join(config: RunConfig, member: Member, notes: Sequence[Note]) -> int:
    device = environment.resolve_device(config.context.device_target)
    device_id = config.context.device_id
    if device == "Ascend":
        device_id = device_of(member, device_id)
    ascend_context.choose(AscendSettings.of(config.context), device, tell=False)
    progress.redirect(Outlet(-1 if member.rank is None else member.rank, None))
    with progress.step(f"meet the {member.size} ranks"):
        parallel = config.parallel
        joined = join(member, device, device_id, parallel.rendezvous_timeout, parallel.hccl_timeout)
    progress.redirect(Outlet(joined.rank, None))
    plan, folder = _agree(config, joined)
    with folder:
        folder.open_log(f"rank_{joined.rank}.log")
        log_details(notes)
        plan = dataclasses.replace(plan, config=placed(plan.config, device, device_id))
        board = Board(joined.place.folder / BOARD) if len(joined.here) == joined.size else None
        with _patient(board):
            cut_short = not _work(plan.of_rank(joined.rank), folder, board)
    joined.place.done()
    joined.place.leave()
    if cut_short:
        raise KeyboardInterrupt
    return 0


def _work(plan: Plan, folder: RunFolder, board: Board | None) -> bool:
    """Do this rank's part; whether it was done to the end, and not cut short by Ctrl-C."""
    from lite_runner.backends.collectives import gather

    try:
        mode, stop = run_mode(plan.config.run_mode), CommonStop(board, plan.ranks)
        mode.run(plan, folder, stop.here)
    except CutShort:
        gather(b"")  # rank 0 may be writing yet, and msrun ends all once one ends in 130
        return False
    return True


@contextmanager
def _patient(board: Board | None) -> Iterator[None]:
    """Within, the first Ctrl-C lets the ranks that generate come to an end; a second one, or the
    end of their time for that, ends this process."""
    if board is None:
        yield
        return
    late = f"interrupted: the ranks did not stop within {STOP_S:.0f} s"
    patience = threading.Timer(STOP_S, _leave, (late, EXIT_INTERRUPTED))

    def take() -> bool:
        if board.take():
            patience.start()
        elif board.taken:
            _leave("interrupted", EXIT_INTERRUPTED)
        return board.taken

    with offered(take):
        try:
            yield
        finally:
            patience.cancel()
            if patience.ident is not None:
                patience.join()  # MindSpore's end crashes beside a thread


def _agree(config: RunConfig, joined: Joined) -> tuple[Plan, RunFolder]:
    """What the first rank of this machine has read and checked, and the folder that it has made."""
    from lite_runner.backends.collectives import gather

    told = {}
    if joined.leads:
        local = len(joined.here)
        parallel = dataclasses.replace(config.parallel, local_worker_num=local)
        config = dataclasses.replace(config, parallel=parallel)
        if joined.rank == 0:
            config = with_seed(config)
        plan = plan_for_ranks(config)
        made = RunFolder.create(config.output_dir, config.run_mode, config.model_name)
        made.write_config(kept(plan.config.without_secrets()))
        Board.create(joined.place.folder / BOARD, joined.size)
        told = {"plan": plan.to_dict(), "folder": str(made.path)}
    leader = json.loads(gather(json.dumps(told).encode())[joined.here[0]])
    raw = leader["plan"]
    plan = Plan.from_dict(raw, from_dict(raw["config"]))
    return plan, RunFolder(Path(leader["folder"]))


def _leave(line: str, exit_code: int) -> int:
    """Say why, and end at once: MindSpore's own end would wait for the other ranks."""
    print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(exit_code)
