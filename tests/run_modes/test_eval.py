"""run_mode=eval: keys, windows, and runs of tiny models from the command line to result.json."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy.special import log_softmax

from lite_runner import run_modes
from lite_runner.app import main
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend, NativeOptions
from lite_runner.config import prompts
from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.native.packed_model import pack
from lite_runner.output import scoring
from lite_runner.output.scoring import windows
from lite_runner.run_modes import heads
from lite_runner.run_modes.eval import Config, read_text
from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.each import each
from tests.output.fake_backend import FakeBackend, logits_of_positions
from tests.refusals import refused

TEXT = "A text, neither long nor short: 文字。\n"
EVAL = ["verbosity=0", "run_mode=eval", "model=tiny_llama", "eval_data=text.txt"]
Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working folder of the test, with text.txt."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def run(*overrides: str, code: int = 0) -> dict[str, Any]:
    """result.json of a run in this process."""
    assert main([*EVAL, *overrides]) == code
    result: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    return result


@pytest.mark.usefixtures("float32_cache")
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_bloom"])
def test_a_run_equals_the_logits_token_by_token(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    result = run(f"model={model}", "eval_window=16", "eval_stride=6", "seed=3")
    config = run_modes.resolve(parse([*EVAL, f"model={model}"], heads()))[0].model_config()
    assert config is not None
    layers = pack(config, QuantizedWeights(random_checkpoint(config, 3), config))
    backend = NativeBackend(config, layers, NativeOptions(slots=1, length=64))
    ids = np.array(byte_tokenizer().encode(TEXT), np.int32)
    losses = []
    for window in windows(len(ids), 16, 6):
        for place in range(window.start, window.end - 1):
            row = Row(0, ids[place : place + 1], place - window.start)
            logits = log_softmax(backend.forward([row])[0].astype(np.float64))
            if place + 1 >= window.first:
                losses.append(-logits[ids[place + 1]])
    found = result["evaluation"]
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    assert found["tokens"] == len(ids) == found["scored_tokens"] + 1 == len(losses) + 1
    assert (found["window"], found["stride"]) == (16, 6)
    assert found["seconds"] > 0 and found["tok_s"] > 0 and not found["interrupted"]
    assert (result["run_mode"], result["results"], found["quant"]) == ("eval", [], "none")
    line = f"perplexity {found['perplexity']:.4f}: {len(losses)} of {len(ids)} tokens scored"
    assert capsys.readouterr().out.startswith(line)


def test_the_program_scores(folder: Path, cli: Cli) -> None:
    done = cli(*EVAL)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "outputs/latest/result.json").read_text(encoding="utf-8"))
    ids = byte_tokenizer().encode(TEXT)
    found = result["evaluation"]
    assert (found["window"], found["stride"], found["windows"]) == (256, 256, 1)
    assert found["scored_tokens"] == len(ids) - 1
    # Random weights know nothing: all 320 tokens are about as likely.
    assert found["perplexity"] == pytest.approx(320, rel=0.1)
    assert done.stdout.splitlines() == [
        f"perplexity {found['perplexity']:.4f}: {len(ids) - 1} of {len(ids)} tokens scored,"
        " 1 window of 256"
    ]
    assert result["backend"] == "native"


def test_an_adapter_is_merged(folder: Path) -> None:
    random = np.random.default_rng(1)
    tensors = {
        f"base_model.model.model.layers.0.mlp.up_proj.lora_{name}.weight": random.standard_normal(
            shape, np.float32
        )
        for name, shape in {"A": (2, 64), "B": (128, 2)}.items()
    }
    (folder / "adapter").mkdir()
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["up_proj"]}
    settings |= {"layers_to_transform": [0]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    save = ["convert_output=base.safetensors", "convert_format=safetensors"]
    random_model = folder / "random.safetensors"
    write_random(random_model)
    convert = ["verbosity=0", "run_mode=convert", "model=tiny_llama", *save, "merge=true"]
    sources = [f"load_checkpoint={random_model}", "adapter_path=adapter"]
    assert main([*convert, *sources]) == 0
    merged = run("load_checkpoint=base.safetensors")["evaluation"]["perplexity"]
    assert run(*sources)["evaluation"]["perplexity"] == pytest.approx(merged, rel=1e-9)
    assert run(sources[0])["evaluation"]["perplexity"] != pytest.approx(merged, rel=1e-6)


def write_random(path: Path) -> None:
    """A checkpoint of tiny_llama in MindFormers' names."""
    config = run_modes.resolve(parse(EVAL, heads()))[0].model_config()
    assert config is not None
    save_file({name: each.read() for name, each in random_checkpoint(config, 0).items()}, path)


def test_an_interrupted_run_writes_what_there_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = FakeBackend({1: KeyboardInterrupt()})
    monkeypatch.setattr(scoring, "open_run", lambda *_, **__: scorer)
    (folder / "text.txt").write_text("\x01" * 40)
    found = run("eval_window=10", code=130)["evaluation"]
    assert found["interrupted"] and found["windows"] == 1
    losses = -log_softmax(logits_of_positions(9).astype(np.float64), axis=1)[:, 1]
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-6)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfea", "eval_data: text.txt is not UTF-8: byte 0xff at 0"),
        (b"", "eval_data: tokens of text.txt: got 0, expected at least 2"),
        ("\ufeffa".encode(), "eval_data: tokens of text.txt: got 1, expected at least 2"),
    ],
)
def test_a_text_that_cannot_be_scored_ends_in_2_before_loading(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    expected: str,
) -> None:
    monkeypatch.setattr(scoring, "open_run", lambda *_, **__: pytest.fail("loaded"))
    (folder / "text.txt").write_bytes(content)
    refused(EVAL, 2)
    assert expected in capsys.readouterr().err
    assert not Path("outputs/latest/result.json").exists()


KEYS = ("run_mode=eval", "model=tiny_llama")
ITSELF = f"eval_data={__file__}"


@each(
    ("settings", "expected"),
    [
        (["eval_data="], "eval_data is empty; give a text file"),
        (["eval_data=nowhere.txt"], "eval_data: no file nowhere.txt"),
        (["eval_data=/"], "eval_data: no file /"),
        ([f"eval_data={'x' * 5000}"], "eval_data: no file xxx"),
        (["eval_window=1"], "eval_window: got 1, expected an integer >= 2 or null"),
        (["eval_window=257"], "eval_window: got 257, expected at most the model's context of 256"),
        (["eval_stride=0"], "eval_stride: got 0, expected an integer >= 1 or null"),
        (["eval_stride=257"], "eval_stride: got 257, expected at most the window of 256 tokens"),
        (["eval_window=8", "eval_stride=9"], "expected at most the window of 8 tokens"),
        (["backend=mslite"], "backend=mslite is not available with run_mode=eval"),
        (
            ["infer.model_dir=x", "backend=ms"],
            "infer.model_dir has an effect only with run_mode=export",
        ),
        (["engine=lite", "backend=ms"], "engine has an effect only with run_mode=export"),
        (["parallel=tp2"], "use_parallel=true has no effect with run_mode=eval"),
        (["predict_data=x"], "predict_data has no effect with run_mode=eval"),
        (["max_new_tokens=9"], "max_new_tokens has no effect with run_mode=eval"),
        (["chat=true"], "chat has no effect with run_mode=eval"),
        (["truncate=left"], "truncate has no effect with run_mode=eval"),
        (["predict_batch_size=2"], "predict_batch_size has no effect with run_mode=eval"),
    ],
)
def test_validation_errors(faults: Faults, settings: list[str], expected: str) -> None:
    assert expected in faults(*KEYS, ITSELF, *settings)


def test_other_run_modes_have_no_window(faults: Faults) -> None:
    text = faults("model=tiny_llama", "predict_data=x", ITSELF, "eval_window=8")
    assert "eval_data has no effect with run_mode=predict" in text
    assert "eval_window has no effect with run_mode=predict" in text


def test_windows_by_default(resolve: Resolve) -> None:
    def sizes(*settings: str) -> tuple[int, int]:
        config = resolve(*KEYS, ITSELF, *settings)
        model = config.model_config()
        assert isinstance(config, Config) and model is not None
        return config.window_of(model)

    assert sizes() == (256, 256)
    assert sizes("model.model_config.seq_length=4096") == (512, 512)
    assert sizes("eval_window=32") == (32, 32)
    assert sizes("eval_stride=64") == (256, 64)


def test_the_config_of_a_run_can_be_run_again(resolve: Resolve) -> None:
    config = resolve(
        *KEYS,
        ITSELF,
        "eval_stride=64",
        "src_strategy_path_or_dir=/s",
        "auto_trans_ckpt=true",
        "load_checkpoint=/c",
    )
    assert run_modes.from_dict(config.to_dict()) == config


def test_reading(resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.md"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    config = resolve(*KEYS, f"eval_data={path}")
    assert isinstance(config, Config)
    assert read_text(config.text_file) == "one\r\ntwo\n"
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_text(config.text_file)
    path.write_bytes(b"x" * 9)
    monkeypatch.setattr("lite_runner.run_modes.eval.MAX_PROMPT_BYTES", 8)
    monkeypatch.setattr(prompts, "MAX_PROMPT_BYTES", 8)
    with pytest.raises(ConfigError, match="has more than 8 bytes"):
        read_text(config.text_file)
