"""Wrapper of every process of a job: runs a program that dies with its parent.

    python msrun_wrapper.py PROGRAM.py ARGUMENT...

msrun itself, its scheduler and its ranks all run in it, so that a SIGKILL of any of them also kills
its children. A rank connects to the launcher's socket here, so the launcher knows it from the start
and notices its end, whatever the cause.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

PARENT_VARIABLE = "LITE_RUNNER_PARENT"  # process id of the parent
SCHEDULES_VARIABLE = "LITE_RUNNER_SCHEDULES"  # 1: this machine has the scheduler
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the program of the command line, as if it had been started directly."""
    _die_with_parent()
    # The launcher blocks SIGINT, and a mask is inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    role = os.environ.get("MS_ROLE")
    if role == "MS_SCHED" and os.environ[SCHEDULES_VARIABLE] != "1":
        return  # msrun starts one wherever master_addr is local, also for a second node on a host
    here = Path(__file__).resolve()
    # Python put the folder of this file first, where the package belongs.
    sys.path[:] = [str(here.parents[2]), *(path for path in sys.path if path != str(here.parent))]
    if role == "MS_WORKER":
        from lite_runner.distributed.events import connect

        # Kept open to the end: when it closes, the launcher knows that this process is gone.
        connection = connect(int(os.environ["RANK_ID"]))
        assert connection is not None
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):  # it had ended before that call
        sys.exit(1)
    os.environ[PARENT_VARIABLE] = str(os.getpid())


if __name__ == "__main__":
    main()
