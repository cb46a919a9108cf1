"""Stands in for a run's ranks under a real msrun: fails in the way that its argument names.

No rank computes anything, so that MindSpore is not imported but by msrun itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from lite_runner.distributed.events import MET, Failure, connect

FOREVER_S = 1000
GENERATES = ("stops", "is deaf", "is interrupted and deaf")


def main(fault: str, message: str) -> None:
    finished = Path(os.environ["LITE_RUNNER_EVENTS"]).with_name("finished")
    if os.environ["MS_ROLE"] == "MS_SCHED":
        where = (os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"]))
        with socket.create_server(where):
            if fault == "scheduler is killed":
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            while not finished.exists():
                time.sleep(0.05)
            time.sleep(1)  # as MindSpore's, it ends later than the ranks
        return
    rank = int(os.environ["RANK_ID"])
    sender = connect(rank)
    assert sender is not None
    if fault == "never meets" and rank == 1:
        sender.stage("looking for the others")
        time.sleep(FOREVER_S)
    sender.stage(MET)
    if fault in GENERATES:
        generate(fault, rank)
        sender.done()
        finished.touch()
        return
    if rank == 1:
        fail(fault, message)
    if fault != "none":
        print(f"rank {rank} waits", flush=True)
        if rank == 0:
            sender.text("waiting\n")
        time.sleep(FOREVER_S)
    if rank == 0:
        sender.text(f"{message}\n")
        sender.note(f"{os.environ['RANK_SIZE']} ranks, SIGINT blocked: {sigint_is_blocked()}")
    sender.done()
    finished.touch()


def generate(fault: str, rank: int) -> None:
    """The work of a rank with its model loaded: steps, until it is told to stop."""
    from lite_runner.config.sections import Ranks
    from lite_runner.distributed.stopping import STOP_FILE, StopCondition, StopFlags

    sender = connect(rank)
    assert sender is not None
    flags = StopFlags(Path(os.environ["LITE_RUNNER_EVENTS"]).with_name(STOP_FILE))
    stop = StopCondition(flags, Ranks(rank, 2, 1))
    stop.reached()
    if rank == 0:
        sender.text("generating\n")
    if fault == "is interrupted and deaf":
        flags.request_stop()
    while not stop.reached():
        time.sleep(0.01)
    if rank == 0:
        sender.text("stopped\n")
    elif fault != "stops":
        time.sleep(FOREVER_S)


def fail(fault: str, message: str) -> None:
    """The end of rank 1."""
    print("rank 1 is about to fail", flush=True)
    if fault == "reports":
        sender = connect(1)
        assert sender is not None
        sender.error(Failure(4, message, "get another", "Traceback:\n  where it happened"))
    elif fault == "exits":
        sys.exit(3)
    elif fault == "is suspended":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "is killed":
        # A process of its own is left behind, as a compiler's would be.
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})", message])
        os.kill(os.getpid(), signal.SIGKILL)


def sigint_is_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


if __name__ == "__main__":
    main(*sys.argv[1:])
