"""The msrun command of a job, its environment, and the port where its ranks meet."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from lite_runner.config.parallel import SOCKET_VARIABLE
from lite_runner.config.sections import Cluster
from lite_runner.distributed.events import FOLDER_VARIABLE
from lite_runner.distributed.msrun_wrapper import PARENT_VARIABLE, SCHEDULES_VARIABLE
from lite_runner.errors import EnvironmentFault
from lite_runner.system.environment import RANK_VARIABLES, reinstall_line
from lite_runner.system.files import GROUP_MAY_READ
from lite_runner.system.secret import without_keys

LOG = "msrun.log"
WRAPPER = Path(__file__).with_name("msrun_wrapper.py")


def command(
    program: Sequence[str],
    cluster: Cluster,
    log_dir: Path,
    *,
    port: int,
    rendezvous_timeout: int,
    rank_table_file: str = "",
) -> list[str]:
    """The command that starts `program` (a .py file and its arguments) as each of this machine's
    ranks. Raises EnvironmentFault if msrun, or a `python` for it, is missing."""
    beside = Path(sys.executable).parent
    msrun = beside / "msrun"
    if not msrun.is_file():
        raise EnvironmentFault(
            f"msrun, which starts several ranks, is not beside this Python ({beside})",
            f"it comes with MindSpore: {reinstall_line('mindspore')}",
        )
    words = [sys.executable, str(WRAPPER), str(msrun)]
    options = {
        "worker_num": cluster.worker_num,
        "local_worker_num": cluster.local_worker_num,
        "master_addr": cluster.master_addr,
        "master_port": port,
        "node_rank": cluster.node_rank,
        "log_dir": log_dir,
        "join": True,
        "cluster_time_out": rendezvous_timeout,
        # No machine has this rank: no `tail -f` of a log is started.
        "tail_worker_log": cluster.worker_num,
    }
    if rank_table_file:
        options["rank_table_file"] = rank_table_file
    words += [f"--{name}={value}" for name, value in options.items()]
    return [*words, _python_name(), str(WRAPPER), *program]


def make_logs(log_dir: Path, cluster: Cluster) -> None:
    """Create `log_dir` and the logs in it for the user and the group: msrun, which writes them,
    leaves their mode. Raises EnvironmentFault."""
    names = [LOG, *(f"worker_{rank}.log" for rank in cluster.local_ranks)]
    if cluster.is_master:
        names.append("scheduler.log")
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        for name in names:
            os.close(os.open(log_dir / name, os.O_WRONLY | os.O_CREAT, GROUP_MAY_READ))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write logs to the folder {log_dir}: {error.strerror}",
            "parallel.log_dir= names another",
        ) from None


def environment(
    events: Path, folder: Path, cluster: Cluster, variables: Mapping[str, str]
) -> dict[str, str]:
    """This process's environment for msrun and its ranks; `events` is the launcher's socket,
    `folder` its run's, `variables` are added."""
    own = without_keys(os.environ)
    # Left over from another job, these would give a rank a wrong identity.
    kept = {name: value for name, value in own.items() if name not in RANK_VARIABLES}
    path = [str(Path(sys.executable).parent), *filter(None, [kept.get("PATH")])]
    return {
        **kept,
        **variables,
        "PATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",  # so that the log of a killed rank has its last lines
        SOCKET_VARIABLE: str(events),
        FOLDER_VARIABLE: str(folder),
        PARENT_VARIABLE: str(os.getpid()),
        SCHEDULES_VARIABLE: "1" if cluster.is_master else "0",
    }


def choose_port(cluster: Cluster) -> int:
    """The scheduler's port: the given one, or a free one.

    Raises EnvironmentFault if it is taken, or if rank 0 is to run here and master_addr is not an
    address of this machine.
    """
    if not cluster.is_master:
        assert cluster.master_port is not None
        return cluster.master_port
    asked = cluster.master_port or 0
    try:
        address = socket.getaddrinfo(
            cluster.master_addr.strip("[]"), asked, type=socket.SOCK_STREAM
        )[0]
        with closing(socket.socket(address[0], socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address[4])
            return int(probe.getsockname()[1])
    except OSError as error:
        where = f"{cluster.master_addr}:{asked}" if asked else cluster.master_addr
        raise EnvironmentFault(
            f"parallel.master_addr, master_port: the ranks cannot join at {where}:"
            f" {error.strerror or error}",
            "another port with parallel.master_port=, or null for a free one; master_addr is an"
            " address of the machine with node_rank 0",
        ) from None


def answers(address: str, port: int) -> bool:
    """True where something listens there, as a scheduler does while it runs."""
    try:
        with socket.create_connection((address.strip("[]"), port), timeout=1):
            return True
    except OSError:
        return False


def _python_name() -> str:
    """The name of this Python on msrun's PATH: `python` or `python3`, which msrun takes."""
    for name in ("python", "python3"):
        path = Path(sys.executable).with_name(name)
        if path.exists() and path.samefile(sys.executable):
            return name
    raise EnvironmentFault(
        f"msrun starts ranks as `python` or `python3`, and neither beside {sys.executable} is that"
        " Python",
        "run from a virtual environment: python -m venv .venv",
    )
