"""What a machine cannot hold is refused before anything is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.errors import EnvironmentFault
from lite_runner.launch import launch
from lite_runner.plan import preflight
from lite_runner.run_modes import heads, resolve
from lite_runner.sizing.need import Memory
from lite_runner.sizing.scaling import PROCESS_BYTES
from lite_runner.system import environment, memory


def config_of(*settings: str) -> RunConfig:
    return resolve(parse(["model=tiny_llama", "predict_data=hi", *settings], heads()))[0]


RANK = Memory(100_000_000, 10_000_000, process=500_000_000)


def check(config: RunConfig, rank: Memory = RANK) -> None:
    preflight.check_machine(config, rank)


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 2)
    check(config_of("parallel=tp2"))
    with pytest.raises(EnvironmentFault, match="4 ranks on this machine need 4 Ascend devices"):
        check(config_of("parallel=tp4"))
    check(config_of("parallel=tp4", "parallel.local_worker_num=2", "parallel.master_port=8118"))


def test_more_ranks_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("parallel=tp2", "context.device_target=CPU")
    needed = 2 * RANK.total + 2 * PROCESS_BYTES
    monkeypatch.setattr(memory, "free_memory", lambda: needed)
    check(config_of(*settings))
    with pytest.raises(EnvironmentFault, match=r"the process 500.0 MB\), and 943.7 MB for msrun"):
        check(config_of(*settings), dataclasses.replace(RANK, adapters=1_000_000))
    monkeypatch.setattr(memory, "free_memory", lambda: needed - 1)
    with pytest.raises(EnvironmentFault, match=r"2 ranks of 610.0 MB each .* 2.2 GB is free"):
        check(config_of(*settings))
    # A second machine has no scheduler.
    second = ("parallel.local_worker_num=1", "parallel.node_rank=1", "parallel.master_port=8118")
    check(config_of(*settings, *second))


def test_each_rank_has_its_own_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10**12)
    monkeypatch.setattr(memory, "free_addresses", lambda: RANK.addresses)
    check(config_of("parallel=tp2", "context.device_target=CPU"))
    monkeypatch.setattr(memory, "free_addresses", lambda: RANK.addresses - 1)
    with pytest.raises(EnvironmentFault, match=r"each rank needs .* of address space .* ulimit -v"):
        check(config_of("parallel=tp2", "context.device_target=CPU"))


def test_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    config = config_of("parallel=tp2", "context.device_target=CPU", f"output_dir={tmp_path}")
    with pytest.raises(EnvironmentFault, match="but 0 B is free"):
        launch(config)
    assert {path.name for path in (tmp_path / "latest").iterdir()} == {"run.log"}
