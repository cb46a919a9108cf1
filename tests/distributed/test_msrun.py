"""The command, environment and port of msrun, as msrun itself reads them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config.sections import Cluster
from lite_runner.distributed import msrun
from lite_runner.errors import EnvironmentFault


def parsed_by_msrun(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> dict[str, object]:
    """The words after `python member.py` as MindSpore's own parser reads them."""
    from mindspore.parallel.cluster import run

    monkeypatch.setattr(sys, "argv", words)
    return vars(run.get_args())


def test_msrun_understands_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = Cluster(8, 4, master_addr="10.0.0.1", node_rank=1)
    words = msrun.command(
        ["rank.py", "a b", "--join=False"],
        cluster,
        tmp_path,
        port=4321,
        rendezvous_timeout=77,
        rank_table_file="table.json",
    )
    assert words[:2] == [sys.executable, str(msrun.WRAPPER)]
    got = parsed_by_msrun(monkeypatch, words[2:])
    expected = {
        "worker_num": 8,
        "local_worker_num": 4,
        "master_addr": "10.0.0.1",
        "master_port": 4321,
        "node_rank": 1,
        "log_dir": str(tmp_path),
        "join": True,
        "cluster_time_out": 77,
        "rank_table_file": "table.json",
        "task_script": "python",
        "task_script_args": [str(msrun.WRAPPER), "rank.py", "a b", "--join=False"],
    }
    assert {name: got[name] for name in expected} == expected


def test_the_environment_of_another_job_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK_ID", "MS_ROLE", "MS_SIMULATION_LEVEL", "RANK_TABLE_FILE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PATH", "/elsewhere")
    monkeypatch.setenv("KEPT", "yes")
    cluster = Cluster(2, 1, node_rank=1)
    found = msrun.environment(tmp_path / "events", tmp_path, cluster, {"NEW": "1"})
    assert not {"RANK_ID", "MS_ROLE", "MS_SIMULATION_LEVEL", "RANK_TABLE_FILE"} & found.keys()
    assert (found["KEPT"], found["NEW"]) == ("yes", "1")
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/elsewhere"]
    assert found["LITE_RUNNER_EVENTS"] == str(tmp_path / "events")
    assert found["LITE_RUNNER_FOLDER"] == str(tmp_path)


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert msrun.choose_port(Cluster(2, 2)) not in (0, port)
        with pytest.raises(EnvironmentFault, match="Address already in use"):
            msrun.choose_port(Cluster(2, 2, master_port=port))
        # Another machine's port is its own.
        assert msrun.choose_port(Cluster(2, 1, master_port=port, node_rank=1)) == port
    assert msrun.choose_port(Cluster(2, 2, master_port=port)) == port
    with pytest.raises(EnvironmentFault, match=r"cannot join at 192\.0\.2\.1"):  # nobody's address
        msrun.choose_port(Cluster(2, 2, master_addr="192.0.2.1"))


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "msrun, which starts several ranks, is not beside"), (["msrun"], "is that Python")],
)
def test_missing_programs_beside_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], message: str
) -> None:
    for name in (*names, "python3.11"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3.11"))
    make: Callable[[], object] = lambda: msrun.command(  # noqa: E731
        [], Cluster(2, 2), tmp_path, port=1, rendezvous_timeout=1
    )
    with pytest.raises(EnvironmentFault, match=message):
        make()
