"""A process's rank and job, by its environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lite_runner.distributed.membership import Address, Member, device_of, membership
from lite_runner.distributed.rank_table import Device, RankTable, TableServer
from lite_runner.errors import ArtifactError, EnvironmentFault
from tests.each import each

CLUSTER = {"MS_WORKER_NUM": "4", "MS_SCHED_HOST": "10.0.0.7", "MS_SCHED_PORT": "8118"}
WORKER = {**CLUSTER, "MS_ROLE": "MS_WORKER"}
SCHEDULER = Address("10.0.0.7", 8118)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "hccl_2p_45_10.0.0.7.json"
    devices = (Device(4, "192.168.0.4"), Device(5, "192.168.0.5"))
    RankTable((TableServer("10.0.0.7", devices),)).write(path)
    return path


def test_a_process_of_its_own() -> None:
    assert membership({}) is None
    # Left over, or set for another program.
    assert membership({"RANK_TABLE_FILE": "/no/such", "RANK_SIZE": "8", "DEVICE_ID": "3"}) is None
    assert membership({"RANK_ID": "0"}) is None
    assert membership({"RANK_ID": "0", "RANK_SIZE": "1"}) is None
    assert membership({"MS_WORKER_NUM": "4", "MS_NODE_RANK": "1"}) is None


def test_membership_under_msrun() -> None:
    rank = {**WORKER, "MS_NODE_ID": "3", "RANK_ID": "3", "RANK_SIZE": "4", "DEVICE_ID": "1"}
    assert membership(rank) == Member(size=4, rank=3, scheduler=SCHEDULER, device_id=1)
    scheduler = membership({**CLUSTER, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"})
    assert scheduler == Member(size=4, is_scheduler=True, scheduler=SCHEDULER)
    # With --node_rank=-1 MindSpore gives the ranks out.
    assert membership({**WORKER, "DEVICE_ID": "0"}) == Member(
        size=4, rank=None, scheduler=SCHEDULER, device_id=0
    )


def test_membership_in_a_loop_over_a_rank_table(table: Path) -> None:
    loop = {"RANK_TABLE_FILE": str(table), "RANK_ID": "1", "RANK_SIZE": "2", "DEVICE_ID": "1"}
    assert membership(loop) == Member(size=2, rank=1, table=table, device_id=1)
    del loop["RANK_SIZE"], loop["DEVICE_ID"]  # the table has both
    assert membership(loop) == Member(size=2, rank=1, table=table)


def test_membership_under_ascend_operator() -> None:
    container = {**WORKER, "MS_SERVER_NUM": "0", "MS_NODE_RANK": "1"}
    one = membership({**container, "MS_LOCAL_WORKER": "1"})
    assert one == Member(size=4, rank=1, scheduler=SCHEDULER)
    several = membership({**container, "MS_LOCAL_WORKER": "2"})
    assert several == Member(size=4, rank=2, local_ranks=2, scheduler=SCHEDULER)
    # msrun in such a container starts ranks.
    rank = membership({**container, "MS_LOCAL_WORKER": "2", "MS_NODE_ID": "3", "RANK_ID": "3"})
    assert rank == Member(size=4, rank=3, scheduler=SCHEDULER)


@each(
    ("environ", "parts"),
    [
        ({"MS_ROLE": "MS_WORKER"}, ["MS_ROLE is set", "MS_WORKER_NUM and", "unset MS_ROLE"]),
        ({**WORKER, "MS_SCHED_PORT": ""}, ["but MS_SCHED_PORT is not", "msrun_launcher.sh"]),
        ({**WORKER, "MS_ROLE": "MS_PSERVER"}, ["MS_ROLE: got 'MS_PSERVER'"]),
        ({**WORKER, "MS_NODE_ID": "4"}, ["rank 4 of 4", "below 4"]),
        ({**WORKER, "MS_NODE_ID": "x"}, ["MS_NODE_ID: got 'x', expected a number from 0"]),
        ({**WORKER, "MS_WORKER_NUM": "0"}, ["MS_WORKER_NUM: got '0', expected a number from 1"]),
        ({**WORKER, "MS_LOCAL_WORKER": "2"}, ["but MS_NODE_RANK is not"]),
        ({**WORKER, "MS_LOCAL_WORKER": "3", "MS_NODE_RANK": "0"}, ["divisor of MS_WORKER_NUM=4"]),
        ({"RANK_ID": "1", "RANK_SIZE": "2"}, ["RANK_TABLE_FILE is not", "unset RANK_ID RANK_SIZE"]),
    ],
)
def test_variables_that_make_no_sense(environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        membership(environ)
    for part in parts:
        assert part in str(caught.value)


def test_rank_tables_that_make_no_sense(table: Path) -> None:
    loop = {"RANK_TABLE_FILE": str(table), "RANK_ID": "0"}
    with pytest.raises(EnvironmentFault, match=r"RANK_SIZE: got 8, but .* has 2 ranks"):
        membership({**loop, "RANK_SIZE": "8"})
    with pytest.raises(EnvironmentFault, match="rank 2 of 2"):
        membership({**loop, "RANK_ID": "2"})
    table.write_text("{")
    with pytest.raises(ArtifactError, match="rank table"):
        membership(loop)


def test_the_device_of_a_rank(table: Path) -> None:
    """By the rank table, but of ranks that are started by hand, which say it."""
    by_hand = Member(size=2, rank=0, table=table, device_id=5)
    assert device_of(by_hand, {}) == 5
    with pytest.raises(EnvironmentFault, match="has device 4 for this machine, which shows none"):
        device_of(replace(by_hand, device_id=None), {})
    assert device_of(Member(size=2, rank=0), {}) is None
    assert device_of(Member(size=2, rank=0, device_id=3), {}) == 3
