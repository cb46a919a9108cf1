"""pretrained_model_dir: a Hugging Face folder that says what the model is, as in newer yaml."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from lite_runner.text.tokenizer import byte_tokenizer
from tests.refusals import refused
from tests.tokenizer_files import write_tokenizer

Run = Callable[..., dict[str, Any]]
WriteModel = Callable[..., Path]

# A yaml of MindFormers 2.1, its keys alone.
YAML = """
seed: 0
load_checkpoint: ''
use_parallel: False
run_mode: predict
use_legacy: False
load_ckpt_format: safetensors
balanced_load: False
trainer: {type: CausalLanguageModelingTrainer, model_name: mine}
parallel_config: {data_parallel: 1, model_parallel: 2}
pretrained_model_dir: FOLDER
model:
  model_config:
    compute_dtype: float32
    layernorm_compute_dtype: float32
    softmax_compute_dtype: float32
    rotary_dtype: bfloat16
    params_dtype: bfloat16
    seq_length: 64
generation_config: {do_sample: False, max_length: 64, max_new_tokens: 4, top_k: 1, pad_token_id: 3}
context: {mode: 0, enable_graph_kernel: False, max_device_memory: 59GB}
parallel: {parallel_mode: MANUAL_PARALLEL, enable_alltoall: False}
"""


@pytest.fixture
def folder(write_tiny_llama: WriteModel) -> Path:
    """A model as Hugging Face has it, its tokenizer beside it."""
    model = write_tiny_llama("model")
    write_tokenizer(byte_tokenizer(), model)
    return model


@pytest.fixture
def config(tmp_path: Path, folder: Path) -> str:
    """The yaml that names the folder."""
    path = tmp_path / "predict.yaml"
    path.write_text(YAML.replace("FOLDER", str(folder)), encoding="utf-8")
    return str(path)


def test_the_folder_says_what_the_model_is_wherever_the_weights_are(
    run: Run, config: str, tmp_path: Path
) -> None:
    flags = ["--config", config, "--predict_data", "hello"]
    first = run(*flags)
    assert first["model"] == "mine"
    assert first["load_checkpoint"] == str(tmp_path / "model")
    (row,) = first["results"]
    assert 0 < row["generated_tokens"] <= 4  # as generation_config says
    # The weights alone, elsewhere: the folder still has the sizes and the tokenizer.
    elsewhere = tmp_path / "weights/mine.safetensors"
    elsewhere.parent.mkdir()
    shutil.move(tmp_path / "model/model.safetensors", elsewhere)
    again = run(*flags, "--load_checkpoint", str(elsewhere))
    assert again["load_checkpoint"] == str(elsewhere)
    assert again["results"] == first["results"]
    assert run(*flags, "--load_checkpoint", "random")["load_checkpoint"] == "random"


def test_a_folder_on_the_command_line_needs_no_model(run: Run, folder: Path) -> None:
    flags = ["--run_mode", "predict", "predict_data=hi", "max_new_tokens=2"]
    assert run("--pretrained_model_dir", str(folder), *flags)["model"] == "model"


def test_a_folder_that_says_nothing_is_named(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model/config.json").unlink()
    flags = ["--config", config, "--predict_data", "hi", f"output_dir={tmp_path / 'out'}"]
    refused([*flags, "--load_checkpoint", "random"], 4)
    assert "pretrained_model_dir" in (stderr := capsys.readouterr().err) and "config.json" in stderr
    refused([*flags, "--pretrained_model_dir", str(tmp_path / "none")], 4)
    assert "pretrained_model_dir: " in capsys.readouterr().err


def test_a_yaml_for_ascend_says_what_runs_it_here(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", config, "--predict_data", "hi", f"output_dir={tmp_path / 'out'}"]
    # Before anything is read: neither the folder nor the checkpoint is looked for.
    shutil.rmtree(tmp_path / "model")
    refused([*flags, "--device_target", "Ascend", "--use_parallel", "True"], 3)
    stderr = capsys.readouterr().err
    assert "context.device_target=CPU" in stderr and "use_parallel=false" in stderr


def test_a_short_context_is_no_fault_of_the_defaults(write_tiny_llama: WriteModel) -> None:
    """model=auto would generate 128 tokens: more than this model, and these run modes, hold."""
    short = write_tiny_llama("short", {"seq_length": 64})
    write_tokenizer(byte_tokenizer(), short)
    Path("text.txt").write_text("a text of a few words", encoding="utf-8")
    model = ["verbosity=0", "model=auto", f"load_checkpoint={short}"]
    assert main([*model, "run_mode=shard", "parallel=tp2"]) == 0
    assert main([*model, "run_mode=eval", "eval_data=text.txt"]) == 0
    assert main([*model, "predict_data=a"]) == 0
    refused([*model, "predict_data=a", "max_new_tokens=64"], 2)
