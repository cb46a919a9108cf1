"""What a machine cannot hold is refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner import environment
from lite_runner.config.argv import parse
from lite_runner.config.compose import heads, resolve
from lite_runner.config.schema import RunConfig
from lite_runner.errors import EnvironmentFault
from lite_runner.launch import launch
from lite_runner.launcher import preflight


def config_of(*settings: str) -> RunConfig:
    return resolve(parse(["model=tiny_llama", "predict_data=hi", *settings], heads()))[0]


def check(config: RunConfig, adapters: int = 0) -> None:
    model = config.model_config()
    assert model is not None
    preflight.check_machine(config, model, slots=1, length=32, adapters=adapters)


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 2)
    check(config_of("parallel=tp2"))
    with pytest.raises(EnvironmentFault, match="4 ranks on this machine need 4 Ascend devices"):
        check(config_of("parallel=tp4"))
    check(config_of("parallel=tp4", "parallel.local_worker_num=2", "parallel.master_port=8118"))


def test_more_ranks_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("parallel=tp2", "context.device_target=CPU")
    monkeypatch.setattr(preflight, "free_memory", lambda: 4 * 472 * 10**6)
    check(config_of(*settings))
    monkeypatch.setattr(preflight, "free_memory", lambda: 4 * 471 * 10**6)
    with pytest.raises(EnvironmentFault, match=r"471.9 MB in 4 processes, need 1\.\d GB, but"):
        check(config_of(*settings))
    few = 100_000
    monkeypatch.setattr(preflight, "free_memory", lambda: 4 * 472 * 10**6 + 2 * few)
    check(config_of(*settings), adapters=few)
    with pytest.raises(EnvironmentFault, match=r"of cache and 1.0 MB of adapters each, and"):
        check(config_of(*settings), adapters=10 * few)
    monkeypatch.setattr(preflight, "free_memory", lambda: 4 * 471 * 10**6)
    # A second machine has no scheduler.
    second = ("parallel.local_worker_num=1", "parallel.node_rank=1", "parallel.master_port=8118")
    check(config_of(*settings, *second))


def test_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "free_memory", lambda: 0)
    config = config_of("parallel=tp2", "context.device_target=CPU", f"output_dir={tmp_path}")
    with pytest.raises(EnvironmentFault, match="but 0 B is free"):
        launch(config)
    assert {path.name for path in (tmp_path / "latest").iterdir()} == {"run.log"}
