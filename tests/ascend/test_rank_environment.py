"""The environment of a rank on Ascend, under MindSpore's own msrun; ranks.yaml has the facts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner import launch
from lite_runner.config import sections
from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.config.sections import Cluster
from lite_runner.distributed import job
from lite_runner.distributed.job import Limits
from lite_runner.distributed.membership import device_of, membership
from lite_runner.distributed.rank_table import (
    Device,
    RankTable,
    TableServer,
    device_range,
    rank_variables,
    read_rank_table,
    with_rank_table,
)
from lite_runner.errors import ConfigError, EnvironmentFault, RunnerError
from lite_runner.run_modes import heads, resolve
from lite_runner.system import environment
from lite_runner.system.environment import VISIBLE
from tests.light_msrun import light_package
from tests.paths import ROOT

TABLES = ROOT / "tests/fixtures/rank_tables"
FACTS = yaml.safe_load(Path(__file__).with_name("ranks.yaml").read_text())
RECORD = Path(__file__).with_name("record_environment.py")
NAMES = ("RANK_ID", "RANK_SIZE", "DEVICE_ID", "RANK_TABLE_FILE", VISIBLE)


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The physical numbers of this machine's devices."""
    shown = list(range(8))
    monkeypatch.setattr(environment, "physical_ids", lambda: shown)
    for name in (*NAMES, *sections.HCCL_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return shown


def recorded(folder: Path) -> list[dict[str, str]]:
    """The environment of each rank, in their order."""
    files = sorted(folder.glob("rank_*.json"))
    return [json.loads(file.read_text()) for file in files]


def run_recorded(folder: Path, cluster: Cluster, table: Path | None) -> list[dict[str, str]]:
    """The environment of ranks that this program's launcher starts, with a real msrun."""
    read = None if table is None else read_rank_table(table)
    job.run_ranks(
        [str(RECORD), str(folder)],
        cluster,
        folder,
        Limits(rendezvous=60, exit=20),
        rank_table_file=str(table or ""),
        variables=rank_variables(cluster, read, 7200),
    )
    return recorded(folder)


def test_the_ranks_of_a_table(shows: list[int], tmp_path: Path) -> None:
    """By a real msrun; then with the variables of other tables and machines in place of its own."""
    table = TABLES / "visible_devices.json"
    started = run_recorded(tmp_path, Cluster(4, 4), table)
    for rank, environ in enumerate(started):
        assert environ["RANK_ID"] == str(rank)
        assert environ["DEVICE_ID"] == str(FACTS["msrun"]["DEVICE_ID"][rank])
        assert (environ["RANK_SIZE"], environ["RANK_TABLE_FILE"]) == ("4", str(table))
        assert [environ[name] for name in sections.HCCL_VARIABLES] == ["7200", "7200"]
        assert (
            environ.items() >= rank_variables(Cluster(4, 4), read_rank_table(table), 7200).items()
        )
    backwards = tmp_path / "table.json"
    RankTable((TableServer("192.0.2.1", (Device(7), Device(4), Device(6))),)).write(backwards)
    for path, shown, visible, indices in (
        (table, range(8), "4,5,6,7", [0, 1, 2, 3]),
        (table, range(4, 8), "0,1,2,3", [0, 1, 2, 3]),  # in a container
        (backwards, range(8), "4,6,7", [2, 0, 1]),
    ):
        shows[:] = shown
        count = len(indices)
        found = rank_variables(Cluster(count, count), read_rank_table(path), 7200)
        assert found[VISIBLE] == visible
        found |= {"MS_WORKER_NUM": str(count), "RANK_SIZE": str(count)}
        found["RANK_TABLE_FILE"] = str(path)
        for environ, index in zip(started, indices, strict=False):
            member = membership({**environ, **found})
            assert member is not None and device_of(member, {**environ, **found}) == index


def test_the_second_machine_of_a_table(shows: list[int]) -> None:
    table = read_rank_table(TABLES / "ascend_operator.json")
    for node, visible in enumerate(("4,5,6,7", "0,1,2,3")):
        cluster = Cluster(8, 4, master_port=8118, node_rank=node)
        assert rank_variables(cluster, table, 7200, {})[VISIBLE] == visible
    assert list(cluster.local_ranks) == FACTS["msrun"]["RANK_ID"]
    with pytest.raises(ConfigError, match="has 2 machines of 4 ranks") as caught:
        rank_variables(Cluster(8, 8), table, 7200, {})
    assert "parallel.local_worker_num=4" in caught.value.hint


def test_without_a_table_the_ranks_see_what_the_user_says() -> None:
    assert VISIBLE not in rank_variables(Cluster(2, 2), None, 7200, {VISIBLE: "2,3"})


@pytest.mark.parametrize("seconds", ["", "119", "7201", "1.5", "0"])
def test_seconds_that_hccl_does_not_take(seconds: str) -> None:
    with pytest.raises(ConfigError, match=r"hccl_timeout: got .* expected"):
        config_of(f"parallel.hccl_timeout={seconds}")


def test_timeouts_of_hccl() -> None:
    seconds = config_of().parallel.hccl_timeout
    for name in sections.HCCL_VARIABLES:
        for fact in FACTS[name]:
            least, most = fact.get("seconds", (sections.LEAST_HCCL_S, sections.MOST_HCCL_S))
            assert least <= sections.LEAST_HCCL_S and most >= sections.MOST_HCCL_S
            multiple = fact.get("multiple", 1)
            assert seconds // multiple * multiple > fact["default"]
    connect, execute = sections.HCCL_VARIABLES
    assert sections.hccl_timeouts(600, {}) == {connect: "600", execute: "600"}
    assert sections.hccl_timeouts(600, {connect: "1800", execute: ""}) == {execute: "600"}
    assert sections.hccl_timeouts(600, {connect: "1800", execute: "0"}) == {}


def test_mindspore_changes_a_variable_when_it_is_imported() -> None:
    """So that ours is to be set before."""
    from mindspore import context

    (fact,) = (one for one in FACTS["HCCL_CONNECT_TIMEOUT"] if one["package"] == "mindspore")
    assert context._hccl_connect_timeout == str(fact["default"])


@pytest.mark.parametrize("fact", FACTS["run_distribute.sh"], ids=lambda fact: str(fact["version"]))
def test_the_devices_of_run_distribute(shows: list[int], fact: dict[str, Any]) -> None:
    table = read_rank_table(TABLES / "visible_devices.json")
    numbers = device_range(fact["range"])
    node = table.node(numbers.start, numbers.stop, None)
    cluster = Cluster(node.worker_num, node.local_worker_num, node_rank=node.node_rank)
    assert list(cluster.local_ranks) == fact["RANK_ID"]
    visible = rank_variables(cluster, table, 7200, {})
    for rank, device in zip(fact["RANK_ID"], fact["DEVICE_ID"], strict=True):
        index = environment.index_of(table.device_of(rank), visible)
        assert environment.seen_ids(visible)[index] == device


def test_a_rank_that_somebody_elses_msrun_starts(shows: list[int]) -> None:
    environ = {
        **{"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "8", "MS_SCHED_HOST": "192.0.2.1"},
        **{"MS_SCHED_PORT": "8118", "MS_NODE_ID": "1", "RANK_ID": "1", "DEVICE_ID": "1"},
    }
    cases: list[tuple[dict[str, str], int]] = [
        ({}, 1),
        ({VISIBLE: "4,5,6,7"}, 1),
        ({"RANK_TABLE_FILE": str(TABLES / "ascend_operator.json")}, 5),
        ({"RANK_TABLE_FILE": str(TABLES / "ascend_operator.json"), VISIBLE: "4,5,6,7"}, 1),
    ]
    for more, index in cases:
        member = membership({**environ, **more})
        assert member is not None and device_of(member, {**environ, **more}) == index
    other = {**environ, "RANK_TABLE_FILE": str(TABLES / "visible_devices.json")}
    member = membership(other)
    assert member is not None
    with pytest.raises(EnvironmentFault, match=r"has 4 ranks, and this is rank 1 of 8"):
        device_of(member, other)


def test_a_rank_of_a_loop(shows: list[int]) -> None:
    """MindFormers' run_distribute.sh: DEVICE_ID is the device, and where it is left out the table
    says it."""
    environ = {"RANK_TABLE_FILE": str(TABLES / "visible_devices.json"), "RANK_ID": "2"}
    for more in ({}, {"DEVICE_ID": "6"}, {"DEVICE_ID": "6", "RANK_SIZE": "4"}):
        member = membership({**environ, **more})
        assert member is not None and device_of(member, environ) == 6


def config_of(*settings: str) -> RunConfig:
    return resolve(parse(["model=tiny_llama", "predict_data=hi", *settings], heads()))[0]


def with_table(*settings: str) -> tuple[sections.Parallel, sections.Context]:
    config = config_of(*settings)
    return with_rank_table(
        *(config.parallel, config.context), on_ranks=config.on_ranks, starts=config.starts_ranks
    )


FOUR = ("use_parallel=true", "parallel_config.model_parallel=4")


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        (FOUR, True),
        (("parallel=tp4",), False),
        ((*FOUR, "parallel.rank_table_file="), False),
        ((), False),
        ((*FOUR, "context.device_target=CPU"), False),
    ],
)
def test_the_table_of_an_operator(
    shows: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: tuple[str, ...],
    used: bool,
) -> None:
    path = str(TABLES / "visible_devices.json")
    monkeypatch.setenv("RANK_TABLE_FILE", path)
    found = with_table(*settings)[0].rank_table_file
    assert found == (path if used else "")
    stderr = capsys.readouterr().err
    assert ("is not used: this is one process" in stderr) == (settings == ())
    assert ("is not used: it is for Ascend" in stderr) == ("context.device_target=CPU" in settings)


def test_a_table_of_another_job(shows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_TABLE_FILE", str(TABLES / "one_machine.json"))
    with pytest.raises(ConfigError, match=r"one_machine\.json has 8 ranks, expected 4"):
        with_table(*FOUR)


def test_the_device_of_a_table_of_one_rank(shows: list[int], tmp_path: Path) -> None:
    """MindFormers' run_distribute.sh with '[5,6)' sets DEVICE_ID=5, and its context takes it."""
    RankTable((TableServer("192.0.2.1", (Device(5),)),)).write(tmp_path / "table.json")
    asked = ("use_parallel=true", f"parallel.rank_table_file={tmp_path / 'table.json'}")
    assert with_table(*asked)[1].device_id == 5
    shows[:] = [5]  # the only one of a container
    assert with_table(*asked)[1].device_id == 0


def test_the_device_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """MindFormers 1.8, core/context/build_context.py: the config's device_id, else DEVICE_ID."""
    monkeypatch.setenv("DEVICE_ID", "3")
    assert config_of().context.device_id == 3
    assert config_of("--device_id", "6").context.device_id == 6


@pytest.mark.usefixtures("light_msrun")
def test_the_launch_takes_the_table(
    shows: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the command line to msrun, all but the preparation of weights."""
    monkeypatch.setattr(environment, "check_packages", lambda: None)
    monkeypatch.setattr(launch, "check_ranks_fit", lambda plan: None)
    monkeypatch.setattr(launch, "RANK_PROGRAM", RECORD)
    table = TABLES / "visible_devices.json"
    config = config_of(
        "parallel=tp4", f"parallel.rank_table_file={table}", f"output_dir={tmp_path}"
    )
    launch.launch(config)
    found = recorded(tmp_path / "latest")
    assert [environ[VISIBLE] for environ in found] == ["4,5,6,7"] * 4
    monkeypatch.setenv(VISIBLE, "0,1,2,3")
    with pytest.raises(RunnerError, match="hides device 4,5,6,7 of the rank table"):
        launch.launch(config)


def test_a_script_of_ones_own_sees_the_devices(tmp_path: Path) -> None:
    """run_dist_gen.sh, whose ranks are a plain msrun's; here a stand-in shows the machine."""
    devices = tmp_path / "sitecustomize.py"
    devices.write_text(
        "import glob\nreal = glob.glob\n"
        "glob.glob = lambda p, **k: [f'/dev/davinci{i}' for i in range(8)]"
        " if p == '/dev/davinci*' else real(p, **k)\n"
    )
    light_package(tmp_path)
    table = str(TABLES / "visible_devices.json")
    done = subprocess.run(
        [ROOT / "scripts/run_dist_gen.sh", f"{RECORD} {tmp_path}", table, "[4,8)", "4"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(tmp_path),
        },
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = recorded(tmp_path)
    assert [environ[VISIBLE] for environ in found] == ["4,5,6,7"] * 4
    assert [environ["DEVICE_ID"] for environ in found] == list("0123")
    assert {environ["RANK_TABLE_FILE"] for environ in found} == {table}


def test_device_id_has_no_effect_on_cpu() -> None:
    """Ranks have a DEVICE_ID there too, and MindSpore refuses a second, other one."""
    from lite_runner.backends.mindspore.device import set_device

    for device_id in (1, 0, 3):
        set_device("CPU", device_id)
