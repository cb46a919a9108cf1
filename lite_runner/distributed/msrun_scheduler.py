"""A scheduler for ranks that were started without one; it runs as long as one of them does.

    python -m lite_runner.distributed.msrun_scheduler FOLDER SIZE PORT TIMEOUT

FOLDER holds the lock files of the ranks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from lite_runner.config.secret import without_keys
from lite_runner.distributed.liveness import is_alive
from lite_runner.distributed.msrun_wrapper import PARENT_VARIABLE, SCHEDULES_VARIABLE

HOST = "127.0.0.1"
POLL_S = 1.0
MAX_ALONE = 3  # polls in a row that find no rank
_PACKAGE = Path(__file__).resolve().parents[1]


def start(folder: Path, size: int, timeout: int) -> int:
    """Start the scheduler of `size` ranks, which must join within `timeout` s; returns its port."""
    with socket.create_server((HOST, 0)) as free:
        port = int(free.getsockname()[1])
    path = filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")])
    with (folder / "scheduler.log").open("wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), str(size), str(port), str(timeout)],
            env={**without_keys(os.environ), "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # rank 0 may end before the others
        )
    return port


def main(folder: Path, size: int, port: int, timeout: int) -> None:
    """Run MindSpore's scheduler until it exits, or no rank is left."""
    settings = {
        "MS_ROLE": "MS_SCHED",
        "MS_WORKER_NUM": str(size),
        "MS_SCHED_HOST": HOST,
        "MS_SCHED_PORT": str(port),
        "MS_TOPO_TIMEOUT": str(timeout),
        PARENT_VARIABLE: str(os.getpid()),  # it dies with this process
        SCHEDULES_VARIABLE: "1",
    }
    program = [str(_PACKAGE / "distributed/msrun_wrapper.py"), str(_PACKAGE / "rank.py")]
    process = subprocess.Popen([sys.executable, *program], env={**os.environ, **settings})
    alone = 0
    while process.poll() is None and alone < MAX_ALONE:
        time.sleep(POLL_S)
        here = any(is_alive(folder, rank) for rank in range(size))
        alone = 0 if here else alone + 1
    process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
