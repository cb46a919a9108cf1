"""One rank of a job, started by msrun: its part of a run that is planned already.

    python -m lite_runner.rank PLAN RUN_FOLDER [PLUGIN ...]

PLAN is the path of a file in the launcher's memory, so that no key in it is left on a disk.
msrun sets the rank in the environment. It starts the same command once more as the scheduler,
through which the ranks meet.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lite_runner import progress
from lite_runner.distributed.events import SOCKET_VARIABLE, Sender, connect
from lite_runner.distributed.join import meet, schedule
from lite_runner.distributed.membership import membership
from lite_runner.distributed.rank_device import choose_device
from lite_runner.distributed.rank_progress import RankProgress
from lite_runner.distributed.stopping import STOP_FILE, StopFlags, stop_on_ctrl_c
from lite_runner.output.report import RunFolder
from lite_runner.plugins import register_plugins
from lite_runner.shared_plan import execute_as_rank, read_plan
from lite_runner.system.failure import Failure, failure_of
from lite_runner.system.signals import CutShort, Terminated, handled


def main(argv: Sequence[str] | None = None) -> int:
    """Do the work of this rank; the exit code is that of a single process."""
    args = sys.argv[1:] if argv is None else list(argv)
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        schedule()
        return 0
    rank = int(os.environ.get("RANK_ID", "0"))
    sender = connect(rank)
    progress.redirect(RankProgress(rank, sender))
    try:
        with handled():
            register_plugins(args[2:])
            with suppress(CutShort):  # the launcher, which asked the ranks to stop, reports it
                _run(Path(args[0]), Path(args[1]), rank)
        if sender is not None:
            sender.done()
        return 0
    except (Exception, KeyboardInterrupt, Terminated) as error:
        return _exit(sender, failure_of(error))


def _run(plan_file: Path, run_folder: Path, rank: int) -> None:
    with RunFolder(run_folder) as folder:
        folder.open_log(f"rank_{rank}.log")
        plan = read_plan(plan_file)
        member = membership()
        assert member is not None
        device = choose_device(plan.config, member)
        plan = dataclasses.replace(plan, config=device.in_config(plan.config)).of_rank(rank)
        meet(device.meets_on, device.device_id, plan.ranks)
        flags = _stop_flags()
        with stop_on_ctrl_c(flags):
            execute_as_rank(plan, folder, flags)


def _stop_flags() -> StopFlags | None:
    """The launcher's flags; None if the job has other machines too."""
    events = os.environ.get(SOCKET_VARIABLE)
    path = None if events is None else Path(events).with_name(STOP_FILE)
    return None if path is None or not path.exists() else StopFlags(path)


def _exit(sender: Sender | None, failure: Failure) -> int:
    """Report a failure and exit at once: MindSpore's finalization would wait for other ranks."""
    if sender is not None:
        sender.error(failure)
    print(f"error: {failure.message}\n{failure.traceback}", file=sys.stderr, flush=True)
    os._exit(failure.exit_code)


if __name__ == "__main__":
    sys.exit(main())
