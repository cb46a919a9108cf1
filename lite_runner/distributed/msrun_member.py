"""What every process of a job starts with: it runs a program, and ends with its parent.

    python member.py PROGRAM.py ARGUMENT...

msrun itself, its scheduler and its ranks all run through this file, so that a SIGKILL of any of
them ends all that it started. A rank also connects to the launcher's socket here: the launcher
knows it from its first moment on, and sees its end whatever ends it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

PARENT_VARIABLE = "LITE_RUNNER_PARENT"  # process id of who started this process
SCHEDULES_VARIABLE = "LITE_RUNNER_SCHEDULES"  # 1: this machine has the scheduler
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the program that the command line names, as if it had been started itself."""
    _end_with_parent()
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

        # Held to the end: its closing is how the launcher learns that this process is gone.
        connection = connect(int(os.environ["RANK_ID"]))
        assert connection is not None
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):  # it ended before that call
        sys.exit(1)
    os.environ[PARENT_VARIABLE] = str(os.getpid())


if __name__ == "__main__":
    main()
