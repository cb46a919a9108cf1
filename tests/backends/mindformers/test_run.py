"""The yaml for MindFormers, as dry_run shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from lite_runner.app import main
from lite_runner.architectures.quantization import Quantization
from lite_runner.backends import seat
from lite_runner.backends.mindformers.run import LAYER, MindFormersRun
from lite_runner.config.argv import parse
from lite_runner.config.checks import PredictOptions
from lite_runner.errors import ConfigError
from lite_runner.plan.resources import options_of, run_options
from lite_runner.run_modes import heads, resolve
from lite_runner.run_modes.predict import plan as plan_generation

LINE = ["predict_data=hello", "max_new_tokens=20", "load_checkpoint=random", "dry_run=true"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*LINE, "backend=mindformers", *words]) == 0
    _, _, text = capsys.readouterr().out.partition("mindformers.yaml:")
    read: dict[str, Any] = yaml.safe_load(text)
    return read


def test_an_ascend_job_is_written_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Untested with the real one: the yaml has the keys of its own yamls."""
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


def test_the_seat_estimates_what_is_planned() -> None:
    line = ["model=tiny_bloom", "load_checkpoint=random", "predict_data=[Hi,a]"]
    config, _ = resolve(parse([*line, "backend=mindformers", "dry_run=true"], heads()))
    assert isinstance(config, PredictOptions)
    plan = plan_generation(config)
    options = options_of(plan)
    chosen = seat("mindformers")
    assert chosen.memory(plan.model, options) == plan.memory
    model = plan.model.model
    deeper = replace(plan.model, model=replace(model, blocks=model.blocks * 2))
    more = chosen.memory(deeper, options).process - plan.memory.process
    assert more == LAYER * model.num_layers
    assert chosen.dtype(plan.model, options) == plan.dtype == "float16"
    with pytest.raises(ConfigError, match="cannot compute with quantized weights"):
        chosen.memory(replace(plan.model, quantization=Quantization("a16w8")), options)


def test_a_warm_up_is_the_first_token_of_a_prompt() -> None:
    line = ["model=tiny_bloom", "load_checkpoint=random", "predict_data=[Hi,a]"]
    config, _ = resolve(parse([*line, "backend=mindformers", "dry_run=true"], heads()))
    alone, _ = resolve(parse(line, heads()))
    assert isinstance(config, PredictOptions)
    plan = plan_generation(alone)
    options = run_options(config.settings, plan.work, "CPU")
    found = MindFormersRun.of(plan.model.model, options)
    assert found.fill == [plan.work.tokens[0][0]] != [plan.work.tokens[0][1]]


def test_a_tied_head_is_a_weight_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """MindFormers 1.0.2 wants it in the file."""
    line = ["model=tiny_qwen2", "backend=mindformers", "load_checkpoint=random", "dry_run=true"]
    found = []
    for tied in ("true", "false"):
        tie = f"model.model_config.tie_word_embeddings={tied}"
        assert main([*line, "predict_data=hi", "max_new_tokens=3", tie]) == 0
        lines = capsys.readouterr().out.splitlines()
        found.append([one for one in lines if one.startswith(("weights ", "parameters "))])
    tied, untied = found
    assert tied[1] == untied[1] and tied[0] != untied[0]
