"""Runs of tiny random models, from the command line to the files that they leave."""

from __future__ import annotations

import ast
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.app import main
from lite_runner.text.tokenizer import byte_tokenizer
from tests.paths import ROOT
from tests.refusals import refused
from tests.tokenizer_files import write_tokenizer

Run = Callable[..., dict[str, Any]]
WriteModel = Callable[..., Path]


@pytest.fixture
def run(run: Run) -> Run:
    """Without progress."""
    return functools.partial(run, "verbosity=0")


@pytest.mark.parametrize("model", ["tiny_bloom", "tiny_llama", "tiny_qwen2", "tiny_gpt2"])
def test_every_architecture_predicts(
    run: Run, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    result = run(f"model={model}", "predict_data=I love Beijing, because", "max_new_tokens=5")
    (row,) = result["results"]
    assert result["load_checkpoint"] == "random"
    assert row["prompt"] == "I love Beijing, because"
    assert row["prompt_tokens"] == len(row["prompt"])
    assert len(row["token_ids"]) == row["generated_tokens"] <= 5
    captured = capsys.readouterr()
    assert captured.out == row["text"] + "\n"
    assert captured.err == ""
    texts = ast.literal_eval(Path("outputs/latest/text_generation_result.txt").read_text("utf-8"))
    assert texts == [{"text_generation_text": [row["prompt"] + row["text"]]}]


def test_a_row_is_the_same_alone_in_a_batch_and_without_a_cache(run: Run) -> None:
    model, options = "model=tiny_llama", ["max_new_tokens=6", "do_sample=true", "seed=3"]
    texts = ["a", "some longer prompt", "中文", "fourth"]
    batch = run(model, f"predict_data={json.dumps(texts)}", *options)
    tokens = [row["token_ids"] for row in batch["results"]]
    one_slot = run(model, f"predict_data={json.dumps(texts)}", *options, "predict_batch_size=1")
    assert [row["token_ids"] for row in one_slot["results"]] == tokens
    alone = run(model, f"predict_data={texts[0]}", *options)
    assert alone["results"][0]["token_ids"] == tokens[0]
    anew = run(
        model, f"predict_data={json.dumps(texts)}", *options, "model.model_config.use_past=false"
    )
    assert [row["token_ids"] for row in anew["results"]] == tokens


def test_returns_and_beams(run: Run) -> None:
    model = ["model=tiny_gpt2", "predict_data=['a','b']", "max_new_tokens=4"]
    sampled = run(*model, "do_sample=true", "num_return_sequences=3")
    assert [row["prompt"] for row in sampled["results"]] == ["a"] * 3 + ["b"] * 3
    texts = ast.literal_eval(Path("outputs/latest/text_generation_result.txt").read_text("utf-8"))
    assert [len(entry["text_generation_text"]) for entry in texts] == [3, 3]
    beams = run(*model, "num_beams=3", "num_return_sequences=2")
    assert [row["prompt"] for row in beams["results"]] == ["a", "a", "b", "b"]


def test_a_seed_is_drawn_for_each_run_and_repeats_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["model=tiny_llama", "predict_data=x", "max_new_tokens=12", "eos_token_id=[]"]
    assert "seed" not in run(*options)
    drawn = [run(*options, "do_sample=true", "temperature=2.0") for _ in range(2)]
    tokens = [result["results"][0]["token_ids"] for result in drawn]
    assert drawn[0]["seed"] != drawn[1]["seed"] and tokens[0] != tokens[1]
    config = str(Path("outputs/latest/config.yaml").resolve())
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(["verbosity=1", "--config", config]) == 0
    assert "note:" not in capsys.readouterr().err
    monkeypatch.chdir("..")
    again = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
    assert (again["seed"], again["results"]) == (drawn[1]["seed"], drawn[1]["results"])


def test_a_file_of_records_and_lines_of_json(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "first", "id": "q1", "max_new_tokens": 2}, {"prompt": "b", "seed": 3}]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ["model=tiny_llama", "do_sample=true", "max_new_tokens=5", "eos_token_id=[]"]
    result = run(*options, "predict_data=p.jsonl", "output_format=jsonl")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["id"], line["tokens"]) for line in lines] == [("q1", 2), (1, 5)]
    found = result["results"]
    assert [line["text"] for line in lines] == [row["text"] for row in found]
    assert found[0]["id"] == "q1" and "id" not in found[1]
    alone = run(*options, "predict_data=b", "seed=3", "weights_seed=0")["results"]
    assert alone[0]["token_ids"] == found[1]["token_ids"]


def test_a_prompt_has_the_text_that_its_options_give_alone(run: Run) -> None:
    of_run = ["model=tiny_llama", "max_new_tokens=12", "eos_token_id=[]", "weights_seed=0"]
    (greedy,) = run(*of_run, "predict_data=p0")["results"]
    stop = next(letter for letter in greedy["text"][3:] if letter.isalnum() and letter.isascii())
    each = [
        {},
        {"do_sample": True, "temperature": 1.5, "seed": 4},
        {"do_sample": True, "top_k": 5, "seed": 4, "max_new_tokens": 7},
        {"do_sample": True, "top_p": 0.5, "min_p": 0.01, "seed": 9, "priority": -3},
        {"repetition_penalty": 1.3, "min_new_tokens": 3},
        {"stop": ["never", stop], "logprobs": 2, "prompt_logprobs": 1},
    ]
    rows = [{"prompt": f"p{i % 2}", **options} for i, options in enumerate(each)]
    rows[5]["prompt"] = "p0"
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for batch in ("predict_batch_size=2", "predict_batch_size=6"):
        together = run(*of_run, "predict_data=p.jsonl", batch)
        assert "seed" in together
        for row, options, given in zip(together["results"], each, rows, strict=True):
            settings = [f"{key}={json.dumps(value)}" for key, value in options.items()]
            settings = [one for one in settings if not one.startswith("priority")]
            (alone,) = run(*of_run, f"predict_data={given['prompt']}", *settings)["results"]
            assert {**row, "cached_tokens": 0} == {**alone, "cached_tokens": 0}
    ended = together["results"][5]
    assert ended["finish_reason"] == "stop"
    assert ended["text"] == greedy["text"][: greedy["text"].index(stop)]


def test_stop_text_ends_and_is_left_out(run: Run) -> None:
    options = ["model=tiny_bloom", "predict_data=x", "max_new_tokens=12", "eos_token_id=[]"]
    text = run(*options)["results"][0]["text"]
    stop = text[4:6]
    row = run(*options, f"stop={stop}")["results"][0]
    assert row["finish_reason"] == "stop"
    assert row["text"] == text[: text.index(stop)]


def test_prompts_from_a_file_and_standard_input(
    run: Run, cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    Path("prompts.txt").write_text("first\n第二\n", encoding="utf-8")
    result = run("model=tiny_llama", "predict_data=prompts.txt", "max_new_tokens=2")
    assert [row["prompt"] for row in result["results"]] == ["first", "第二"]
    done = cli(
        "model=tiny_llama", "predict_data=-", "max_new_tokens=2", stdin="{a}=b, 'c'\n", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "outputs/latest/result.json").read_text(encoding="utf-8"))
    assert saved["results"][0]["prompt"] == "{a}=b, 'c'"


def test_a_prompt_that_does_not_fit_needs_truncate(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["model=tiny_llama", f"predict_data={'word ' * 60}", "max_new_tokens=6"]
    refused(options, 2)
    message = capsys.readouterr().err
    assert "300 tokens" in message and "256" in message and "truncate=left" in message
    assert run(*options, "truncate=left")["results"][0]["prompt_tokens"] == 250


def test_timing_holds_rates_without_compiling(run: Run) -> None:
    options = ["model=tiny_llama", "predict_data=hello", "max_new_tokens=20"]
    assert run(*options)["timing"]["compile_s"] == 0
    began = time.monotonic()
    timing = run(*options, "backend=ms", "model.model_config.num_layers=1")["timing"]
    whole = time.monotonic() - began
    assert set(timing) == {
        "load_s",
        "compile_s",
        "prefill_s",
        "decode_s",
        "prefill_tok_s",
        "decode_tok_s",
        "time_to_first_token_s",
        "drafted_tokens",
        "accepted_tokens",
        "preemptions",
    }
    assert timing["compile_s"] > 0
    assert timing["decode_tok_s"] == pytest.approx(19 / timing["decode_s"])
    # Parts of the run that do not overlap: compiling counts in none of the others.
    parts = ["load_s", "compile_s", "prefill_s", "decode_s"]
    assert sum(timing[part] for part in parts) <= whole


@pytest.mark.parametrize(("new", "message"), [(1, "1 token, "), (2, "2 tokens, ")])
def test_the_last_line_sums_up(capsys: pytest.CaptureFixture[str], new: int, message: str) -> None:
    options = [f"max_new_tokens={new}", "eos_token_id=[]"]
    assert main(["model=tiny_gpt2", "predict_data=hi", *options]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(message) and "results in " in last


def test_not_a_number_ends_in_1_with_the_step(
    write_tiny_llama: WriteModel, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = np.full(64, np.nan, np.float32)
    write_tiny_llama("model", **{"model.norm_out.weight": broken})
    options = ["load_checkpoint=model", "predict_data=hi", "verbosity=0"]
    assert main(["model=tiny_llama", *options]) == 1
    assert "step 0" in capsys.readouterr().err


def test_another_model_than_the_checkpoint_ends_in_4(
    write_tiny_llama: WriteModel, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_llama("model")
    options = ["load_checkpoint=model", "predict_data=hi", "model.model_config.theta=5e5"]
    refused(["model=tiny_llama", *options], 4)
    message = capsys.readouterr().err
    assert "theta: the config says 500000.0, the checkpoint 10000.0" in message
    assert "model=auto" in message


def test_a_mistral_without_a_window_is_what_mindformers_calls_a_llama(
    write_tiny_llama: WriteModel,
) -> None:
    folder = write_tiny_llama("model")
    write_tokenizer(byte_tokenizer(), folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings |= {"model_type": "mistral", "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    options = ["load_checkpoint=model", "predict_data=hi", "max_new_tokens=2"]
    assert main(["model=tiny_llama", *options]) == 0


def test_a_checkpoint_without_tokenizer_ends_in_4_before_it_is_loaded(
    write_tiny_llama: WriteModel, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_llama("model")
    refused(["model=auto", "load_checkpoint=model", "predict_data=hi"], 4)
    captured = capsys.readouterr().err
    assert "no tokenizer in model" in captured and "load model" not in captured
    assert "processor.tokenizer.tokenizer_file=" in captured


# A run whose fourth step waits for Ctrl-C.
WAITS = """
import sys, time
from lite_runner.app import main
from lite_runner.generation import Engine

def step(self, step=Engine.step):
    if self.scheduler.timing.decode_tokens == 3:
        print("waiting", file=sys.stderr, flush=True)
        for _ in range(600):  # a signal that comes just before a sleep does not end that sleep
            time.sleep(1)
    return step(self)

Engine.step = step
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, "model=tiny_llama", "predict_data=long", "eos_token_id=[]"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "waiting\n")
    assert all(lines)  # "" is the end of a run that did not come to wait
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate()
    result = json.loads((tmp_path / "outputs/latest/result.json").read_text(encoding="utf-8"))
    (row,) = result["results"]
    assert process.returncode == 130, errors
    assert (row["finish_reason"], row["generated_tokens"]) == ("interrupted", 4)
    assert text == f"{row['text']}\n"


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model=bloom_7.1b", "predict_data=hi", "dry_run=true"]) == 0
    plan = capsys.readouterr().out
    assert "7,069,016,064" in plan  # the published model's exact count
    assert "hf://bigscience/bloom-7b1" in plan and "28.3 GB" in plan
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_copies_has_the_rows_that_each_would_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = "predict_data=[" + ",".join(["hi"] * 50) + "]"
    assert main(["model=tiny_llama", prompts, "parallel=dp2", "dry_run=true"]) == 0
    plan = capsys.readouterr().out
    (each,) = [line for line in plan.splitlines() if line.startswith("each rank")]
    assert " for 25 x " in each  # as many copies compute at once as would alone: up to 32


def test_mindformers_command_line_runs(run: Run, tmp_path: Path) -> None:
    Path("predict.yaml").write_text(
        """
run_mode: 'predict'
use_parallel: True
trainer: {type: CausalLanguageModelingTrainer, model_name: 'llama2_small'}
runner_config: {epochs: 2}
context: {mode: 0, device_target: "CPU"}
model:
  model_config: {type: LlamaConfig, seq_length: 128, hidden_size: 64, num_layers: 2, num_heads: 4,
    vocab_size: 320, multiple_of: 32, rms_norm_eps: 1.0e-5, bos_token_id: 1, eos_token_id: 2,
    pad_token_id: 0, compute_dtype: "float32", use_past: True, max_decode_length: 64}
  arch: {type: LlamaForCausalLM}
processor: {tokenizer: {type: LlamaTokenizer}}
""",
        encoding="utf-8",
    )
    flags = "--config predict.yaml --run_mode predict --use_parallel False --load_checkpoint random"
    result = run(*flags.split(), "--predict_data", "I love Beijing, because", "max_new_tokens=3")
    assert result["model"] == "llama2_small"
    assert result["results"][0]["prompt"] == "I love Beijing, because"


def test_values_that_float16_cannot_hold_are_an_error_that_names_the_cache(
    run: Run, write_tiny_llama: WriteModel, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.0.attention.wv.weight"
    folder = write_tiny_llama("large", **{name: np.full((48, 64), 1e6, np.float32)})
    write_tokenizer(byte_tokenizer(), folder)
    line = [f"model={folder}", "predict_data=hello", "max_new_tokens=2"]
    assert main(line) == 1
    assert "kv_cache=fp32" in capsys.readouterr().err
    assert len(run(*line, "kv_cache=fp32")["results"][0]["token_ids"]) == 2


def test_a_later_run_reads_the_prefix_from_the_disk(
    run: Run, write_tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    write_tokenizer(byte_tokenizer(), write_tiny_llama("model", {"vocab_size": 320}))
    asked = ["model=model", "max_new_tokens=4", f"predict_data={'long ' * 16}end"]
    found = [run(*asked, f"prefix_cache={one}") for one in ("auto", "disk", "disk", "auto")]
    (first, *others) = [one["results"][0] for one in found]
    assert [one["cached_tokens"] for one in others] == [0, 64, 0]
    assert all(one["token_ids"] == first["token_ids"] for one in others)
