"""The yaml for MindFormers, as dry_run shows it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lite_runner.app import main

LINE = ["predict_data=hello", "max_new_tokens=20", "load_checkpoint=random", "dry_run=true"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*LINE, "backend=mindformers", *words]) == 0
    _, _, text = capsys.readouterr().out.partition("mindformers.yaml:")
    read: dict[str, Any] = yaml.safe_load(text)
    return read


def test_an_ascend_job_is_written_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody has run it: what is written is what its own yamls have."""
    found = shown(
        capsys,
        *("model=tiny_qwen2", "context.device_target=Ascend", "context.device_id=2"),
        "context.max_device_memory=50GB",
    )
    assert found["context"] == {
        "mode": 0,
        "device_target": "Ascend",
        "device_id": 2,
        "max_device_memory": "50GB",
    }
    model = found["model"]["model_config"]
    assert model["compute_dtype"] == "float16" and model["use_past"] is True
    assert (model["is_dynamic"], model["use_flash_attention"]) == (True, True)
    assert found["use_parallel"] is False


def test_a_job_on_the_processor(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "model=tiny_bloom", "context.device_target=CPU", "context.device_id=2")
    assert found["context"] == {"mode": 0, "device_target": "CPU", "device_id": 0}
