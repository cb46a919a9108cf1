from __future__ import annotations

from collections.abc import Callable

import pytest

from lite_runner import run_modes
from lite_runner.config.schema import RunConfig
from lite_runner.system import environment
from tests.each import each

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
Notes = Callable[..., list[str]]

TINY = ("model=tiny_llama", "predict_data=hi")


def test_one_machine_needs_no_settings(resolve: Resolve) -> None:
    cluster = resolve(*TINY, "parallel=tp4").cluster
    assert (cluster.worker_num, cluster.local_worker_num) == (4, 4)
    assert cluster.local_ranks == range(4) and cluster.is_master
    assert resolve(*TINY).ranks.size == 1


def test_the_second_of_two_machines(resolve: Resolve) -> None:
    config = resolve(
        *TINY,
        *("parallel=tp2", "parallel_config.data_parallel=2", "parallel.worker_num=4"),
        *("parallel.local_worker_num=2", "parallel.node_rank=1", "parallel.master_port=8118"),
        *("parallel.master_addr=10.0.0.7", "predict_data=['a', 'b']"),
    )
    cluster = config.cluster
    assert cluster.local_ranks == range(2, 4) and not cluster.is_master
    assert (cluster.master_addr, cluster.master_port) == ("10.0.0.7", 8118)
    assert run_modes.from_dict(config.to_dict()) == config


@each(
    ("settings", "expected"),
    [
        (["parallel.worker_num=4"], "worker_num: got 4, expected data_parallel=1 * model_par"),
        (["parallel.local_worker_num=4"], "local_worker_num: got 4, expected a divisor of the 2"),
        (["parallel.node_rank=1"], "2 ranks with parallel.local_worker_num=2 are the only"),
        (["parallel.local_worker_num=1"], "master_port is missing: 2 machines must agree"),
        (["parallel.local_worker_num=1", "parallel.node_rank=2"], "are 2 machines"),
        (["parallel.master_port=80"], "parallel.master_port: got 80, expected"),
        (["parallel.master_port=65536"], "parallel.master_port: got 65536, expected"),
        (["parallel.timeout=0"], "parallel.timeout: got 0, expected"),
    ],
)
def test_numbers_that_do_not_fit(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*TINY, "parallel=tp2", *settings)


@pytest.mark.parametrize(
    "setting", ["worker_num=2", "local_worker_num=1", "node_rank=1", "timeout=9", "log_dir=x"]
)
def test_several_ranks_have_to_be_asked_for(faults: Faults, setting: str) -> None:
    expected = f"parallel.{setting} has an effect only with use_parallel=true"
    assert expected in faults(*TINY, f"parallel.{setting}")


def test_more_threads_than_cpus_are_noted(
    resolve: Resolve, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "cores", lambda processes=1: max(1, 2 // processes))
    for argv in ([], ["context.threads=2"], ["parallel=tp2", "context.threads=1"]):
        assert notes(*TINY, *argv) == [], argv
    (note,) = notes(*TINY, "context.threads=9")
    monkeypatch.setenv("RANK_ID", "0")  # left over: this process is in no job
    assert notes(*TINY, "context.threads=9") == [note]
    assert note.startswith("context.threads=9: this process may use 2 CPU(s)")
    assert note.endswith("-> context.threads=2, or leave it out")
    (note,) = notes(*TINY, "parallel=tp2", "context.threads=2")
    assert note.startswith("context.threads=2 of each of 2 ranks: this process may use 2 CPU(s)")
    assert note.endswith("-> context.threads=1, or leave it out")
