"""Runs with backend=mindformers, over a stand-in that counts: its token after n tokens is n."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lite_runner.app import main
from lite_runner.backends.mindformers.releases import V1_0_2
from lite_runner.backends.mindformers.run import write_checkpoint
from lite_runner.config.argv import parse
from lite_runner.model import RANDOM, ModelFiles
from lite_runner.run_modes import heads, resolve
from lite_runner.weights import LazyTensor, cast
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from tests.stand_in_mindformers import python_of

MODEL = ("model=tiny_bloom", "backend=mindformers", "load_checkpoint=random", "eos_token_id=[]")
StandIn = Callable[..., None]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    def choose(**acts: object) -> None:
        monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(python_of(tmp_path, **acts)))

    choose()
    return choose


def run(*words: str) -> dict[str, Any]:
    assert main([*MODEL, *words]) == 0
    found: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    return found


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """The error of a command line that ends with `code`."""
    assert main(list(words)) == code
    return capsys.readouterr().err


def tokens(result: dict[str, Any]) -> list[list[int]]:
    return [row["token_ids"] for row in result["results"]]


@pytest.mark.usefixtures("stand_in")
def test_prompts_of_several_lengths_in_batches() -> None:
    words = ["predict_data=[a,bcd,ef]", "max_new_tokens=3", "predict_batch_size=2"]
    result = run(*words)
    assert tokens(result) == [[1, 2, 3], [3, 4, 5], [2, 3, 4]]
    assert (result["backend"], result["engine"]) == ("mindformers", "mindformers-1.0.2")
    assert [row["finish_reason"] for row in result["results"]] == ["length"] * 3
    assert result["timing"]["decode_tok_s"] and result["timing"]["time_to_first_token_s"]
    written = yaml.safe_load(Path("outputs/latest/mindformers.yaml").read_text("utf-8"))
    settings = written["model"]["model_config"]
    assert (settings["batch_size"], settings["seq_length"]) == (2, 6)
    names = {path.name for path in Path("outputs/latest/").iterdir()}
    assert {"config.yaml", "mindformers.yaml", "result.json", "run.log"} <= names
    assert not [name for name in names if name.endswith("lite_runner")]  # no checkpoint is left


@pytest.mark.usefixtures("stand_in")
def test_a_checkpoint_that_is_named_from_here() -> None:
    """MindFormers reads it as it is, in a process that works elsewhere."""
    config, _ = resolve(parse([*MODEL, "predict_data=a"], heads()))
    model = config.model_config()
    assert model is not None
    Path("mine").mkdir()
    write_checkpoint(ModelFiles(RANDOM, None, model, 0), V1_0_2, Path("mine"))
    checkpoint = Path("mine/mindformers.ckpt")
    result = run(f"load_checkpoint={checkpoint}", "predict_data=a", "max_new_tokens=2")
    assert tokens(result) == [[1, 2]]
    written = yaml.safe_load(Path("outputs/latest/mindformers.yaml").read_text("utf-8"))
    assert written["load_checkpoint"] == str(checkpoint.absolute())


def test_a_bfloat16_checkpoint_is_written_in_float32(tmp_path: Path) -> None:
    """MindFormers' networks on a processor take no bfloat16."""
    config, _ = resolve(parse([*MODEL, "predict_data=a"], heads()))
    model = config.model_config()
    assert model is not None
    random = open_ckpt(write_checkpoint(ModelFiles(RANDOM, None, model, 0), V1_0_2, tmp_path))
    brain = {name: cast(name, tensor, "BF16") for name, tensor in random.items()}
    write_ckpt(tmp_path / "brain.ckpt", brain)
    files = ModelFiles("mine", tmp_path / "brain.ckpt", model, 0)
    (tmp_path / "work").mkdir()
    written = open_ckpt(write_checkpoint(files, V1_0_2, tmp_path / "work"))
    assert {one.dtype for one in written.values()} == {"F32"}
    for name, one in written.items():
        np.testing.assert_array_equal(one.float32(), brain[name].float32())


@pytest.mark.usefixtures("stand_in")
def test_a_checkpoint_with_a_cache_in_it() -> None:
    """As MindFormers saves a network with one: its shape is that of another batch and length."""
    config, _ = resolve(parse([*MODEL, "predict_data=a"], heads()))
    model = config.model_config()
    assert model is not None
    Path("mine").mkdir()
    checkpoint = write_checkpoint(ModelFiles(RANDOM, None, model, 0), V1_0_2, Path("mine"))
    cache = LazyTensor((2, 3), "F32", lambda: np.zeros((2, 3), np.float32))
    write_ckpt(Path("saved.ckpt"), {**open_ckpt(checkpoint), "blocks.0.attention.key_past": cache})
    run("load_checkpoint=saved.ckpt", "predict_data=a", "max_new_tokens=2")
    written = yaml.safe_load(Path("outputs/latest/mindformers.yaml").read_text("utf-8"))
    assert Path(written["load_checkpoint"]).name == "mindformers.ckpt"


@pytest.mark.usefixtures("stand_in")
def test_end_tokens_options_of_a_prompt_and_beams(capsys: pytest.CaptureFixture[str]) -> None:
    result = run("predict_data=[a,bcd]", "max_new_tokens=4", "eos_token_id=[2,5]")
    assert tokens(result) == [[1], [3, 4]]
    assert [row["finish_reason"] for row in result["results"]] == ["stop"] * 2
    own = json.dumps([{"prompt": "a", "max_new_tokens": 2}, {"prompt": "b"}])
    assert tokens(run(f"predict_data={own}", "max_new_tokens=4")) == [[1, 2], [1, 2, 3, 4]]
    past = "model.model_config.use_past=false"
    assert tokens(run("predict_data=[a,bcd]", "max_new_tokens=3", "num_beams=2", past)) == [
        [1, 2, 3],
        [3, 4, 5],
    ]
    capsys.readouterr()
    run("predict_data=" + "x" * 65, "max_new_tokens=2", "verbosity=0")
    assert capsys.readouterr().out == "AB\n"  # tokens 65 and 66


@pytest.mark.usefixtures("stand_in")
def test_a_dry_run_shows_the_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "predict_data=a", "dry_run=true"]) == 0
    stdout = capsys.readouterr().out
    assert "backend       mindformers: MindFormers 1.0.2's, on mindspore 2.0.0" in stdout
    assert "type: BloomLMHeadModel" in stdout and "load_checkpoint: random" in stdout


@pytest.mark.parametrize(
    ("acts", "code", "words"),
    [
        ({"start": "die"}, 3, "make mindformers sets up a Python that has it"),
        ({"load": "refuse"}, 4, "not such a one"),
        ({"step": "die"}, 3, "generating: MindFormers 1.0.2 was killed by SIGKILL"),
    ],
)
def test_a_worker_that_fails(
    stand_in: StandIn,
    capsys: pytest.CaptureFixture[str],
    acts: dict[str, object],
    code: int,
    words: str,
) -> None:
    stand_in(**acts)
    assert words in refused(capsys, code, *MODEL, "predict_data=a", "max_new_tokens=2")


def test_unsupported_options_are_refused_before_loading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", "/nowhere/python")
    error = refused(capsys, 3, *MODEL, "predict_data=a")
    assert "LITE_RUNNER_MINDFORMERS_PYTHON=/nowhere/python: not an executable" in error
    error = refused(capsys, 2, *MODEL, "model=tiny_llama", "predict_data=a")
    assert "MindFormers 1.0.2 cannot compute tiny_llama: its heads have" in error


@pytest.mark.usefixtures("stand_in")
def test_a_prompt_with_a_hidden_token(capsys: pytest.CaptureFixture[str]) -> None:
    past = "model.model_config.use_past=false"
    run("predict_data=[a,b]", "max_new_tokens=2", past, "model.model_config.eos_token_id=97")
    assert (
        "MindFormers hides token 97 from attention, which prompt 0 has" in capsys.readouterr().err
    )
