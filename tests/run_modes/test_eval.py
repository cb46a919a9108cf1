"""run_mode=eval: the windows, and runs of tiny models from the command line to result.json."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file
from scipy.special import log_softmax

from lite_runner.app import main
from lite_runner.backends.base import BackendInfo, Row
from lite_runner.backends.mindspore import MindSporeBackend, MindSporeOptions
from lite_runner.config.argv import parse
from lite_runner.errors import RunnerError
from lite_runner.run_modes import eval as evaluate_mode
from lite_runner.run_modes import heads, resolve
from lite_runner.run_modes.eval import evaluate, windows
from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.weights.random import random_checkpoint
from lite_runner.weights.read_ahead import ReadAhead
from tests.refusals import refused

TEXT = "A text, neither long nor short: 文字。\n"
EVAL = ["verbosity=0", "run_mode=eval", "model=tiny_llama", "eval_data=text.txt"]
Cli = Callable[..., "subprocess.CompletedProcess[str]"]


class FakeBackend:
    """Logit t after a token at place p is -t * (1 + p / 1000).

    `faults`: what happens in a window, by its number; a number is added to all logits but the
    first.
    """

    info = BackendInfo("fake", 1000, 1, 1000, 1000, chunk=1, most_logits=1000)
    adapters, compile_s = None, 0.0

    def __init__(self, faults: dict[int, BaseException | float] | None = None) -> None:
        self.faults = faults or {}
        self.windows = 0

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        (row,) = rows
        assert (row.position, row.logits) == (0, len(row.tokens))
        fault = self.faults.get(self.windows, 0.0)
        self.windows += 1
        if isinstance(fault, BaseException):
            raise fault
        logits = of_places(len(row.tokens))
        logits[:, 1:] += fault
        return logits

    def prepare(self) -> None: ...
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...
    def close(self) -> None: ...


def of_places(tokens: int) -> NDArray[np.float32]:
    """The fake's logits after tokens 0 .. n - 1 of a window [n, vocab]."""
    return np.outer(1 + np.arange(tokens) / 1000, -np.arange(1000)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the test runs, beside text.txt."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def run(*overrides: str, code: int = 0) -> dict[str, Any]:
    """result.json of a run in this process."""
    assert main([*EVAL, *overrides]) == code
    result: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    return result


def labels(tokens: int, size: int, stride: int) -> list[list[int]]:
    """Places that are scored in each window: transformers' recipe, which blanks the labels that an
    earlier window had, and never asks for a window's first token."""
    found, seen = [], 0
    for begin in range(0, tokens, stride):
        end = min(begin + size, tokens)
        target = list(range(begin, end))
        target[: len(target) - (end - seen)] = [-100] * (len(target) - (end - seen))
        found.append([place for place in target[1:] if place != -100])
        seen = end
        if end == tokens:
            break
    return [places for places in found if places]


sizes = st.integers(2, 40).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@given(tokens=st.integers(2, 200), size_and_stride=sizes)
def test_windows_are_those_of_transformers(tokens: int, size_and_stride: tuple[int, int]) -> None:
    size, stride = size_and_stride
    found = list(windows(tokens, size, stride))
    assert [list(range(w.first, w.end)) for w in found] == labels(tokens, size, stride)
    for window in found:
        assert window.start < window.first and window.end - window.start <= size
        assert window.end == min(window.start + size, tokens)
    counted = [place for w in found for place in range(w.first, w.end)]
    starts = [] if stride < size else list(range(0, tokens, size))
    assert counted == [place for place in range(1, tokens) if place not in starts]


@given(tokens=st.integers(2, 120), size_and_stride=sizes)
def test_each_token_counts_with_its_own_window(
    tokens: int, size_and_stride: tuple[int, int]
) -> None:
    size, stride = size_and_stride
    ids = (np.arange(tokens) % 7).astype(np.int32)
    found = evaluate(FakeBackend(), ids, size, stride)
    likely = log_softmax(of_places(size).astype(np.float64), axis=1)
    losses = [
        -likely[place - window.start - 1, ids[place]]
        for window in windows(tokens, size, stride)
        for place in range(window.first, window.end)
    ]
    assert found.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    assert (found.scored_tokens, found.tokens) == (len(losses), tokens)
    assert not found.interrupted


def test_ctrl_c_keeps_the_windows_that_are_done() -> None:
    scorer = FakeBackend({2: KeyboardInterrupt()})
    found = evaluate(scorer, np.ones(40, np.int32), 10, 10)
    assert (found.windows, found.scored_tokens, found.interrupted) == (2, 18, True)
    with pytest.raises(KeyboardInterrupt):
        evaluate(FakeBackend({0: KeyboardInterrupt()}), np.ones(40, np.int32), 10, 10)


def test_what_is_no_number_is_an_error_that_says_where() -> None:
    with pytest.raises(RunnerError, match="the likelihood of token 11 is nan"):
        evaluate(FakeBackend({1: math.nan}), np.ones(40, np.int32), 10, 10)
    with pytest.raises(RunnerError, match=r"beyond any number: exp\(800\)"):
        evaluate(FakeBackend({0: -799.0}), np.ones(2, np.int32), 10, 10)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_bloom"])
def test_a_run_equals_the_logits_token_by_token(
    folder: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    result = run(f"model={model}", "eval_window=16", "eval_stride=6", "seed=3")
    config = resolve(parse([*EVAL, f"model={model}"], heads()))[0].model_config()
    assert config is not None
    weights = ReadAhead(random_checkpoint(config, 3))
    backend = MindSporeBackend(config, weights, MindSporeOptions(slots=1, length=64))
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
    done = cli(*EVAL, "backend=auto")
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
    assert result["backend"] == "ms"


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
    config = resolve(parse(EVAL, heads()))[0].model_config()
    assert config is not None
    save_file({name: each.read() for name, each in random_checkpoint(config, 0).items()}, path)


def test_an_interrupted_run_writes_what_there_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = FakeBackend({1: KeyboardInterrupt()})
    monkeypatch.setattr(evaluate_mode, "load", lambda *_, **__: scorer)
    (folder / "text.txt").write_text("\x01" * 40)
    found = run("eval_window=10", code=130)["evaluation"]
    assert found["interrupted"] and found["windows"] == 1
    losses = -log_softmax(of_places(9).astype(np.float64), axis=1)[:, 1]
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
    monkeypatch.setattr(evaluate_mode, "load", lambda *_, **__: pytest.fail("loaded"))
    (folder / "text.txt").write_bytes(content)
    refused(EVAL, 2)
    assert expected in capsys.readouterr().err
    assert not Path("outputs/latest/result.json").exists()
