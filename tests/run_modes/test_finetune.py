"""run_mode=finetune from the command line, and its output run again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lite_runner.app import main
from lite_runner.run_modes import finetune
from lite_runner.weights.formats.safetensors_file import open_safetensors
from tests.paths import ROOT
from tests.refusals import refused

TINY = ["model=tiny_llama", "load_checkpoint=random", "weights_seed=1"]
RUN = [
    *("verbosity=0", "run_mode=finetune", "finetune.data=data.jsonl", "finetune.charts=false"),
    *TINY,
]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four examples in the current folder."""
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": f"{n}: ", "completion": str(n) * 5} for n in range(4)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")
    return path


def metrics() -> list[dict[str, Any]]:
    text = Path("outputs/latest/metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_an_adapter_is_trained_and_served() -> None:
    given = ["finetune.steps=8", "finetune.learning_rate=0.02", "finetune_output=adapter"]
    assert main([*RUN, *given]) == 0
    lines = metrics()
    assert [line["step"] for line in lines] == list(range(1, 9))
    names = ["step", "loss", "grad_norm", "learning_rate", "tokens", "seconds"]
    assert list(lines[0]) == names
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["tokens"] == 4 * (3 + 5 + 1)
    result = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
    assert result["finetune"]["last_loss"] == lines[-1]["loss"]
    files = sorted(file.name for file in Path("adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    converted = ["verbosity=0", "run_mode=convert", "model=tiny_llama", "adapter_path=adapter"]
    assert main([*converted, "convert_format=gguf", "convert_output=adapter"]) == 2
    assert main([*converted, "convert_format=gguf", "convert_output=pirate.gguf"]) == 0
    for form, name in (("gguf", "g"), ("mindformers", "m")):
        assert main([*RUN, *given, f"finetune_output={name}", f"convert_format={form}"]) == 0
    assert [file.name for file in Path("g").iterdir()] == ["g.gguf"]
    assert Path("g/g.gguf").read_bytes() == Path("pirate.gguf").read_bytes()
    assert Path("m/adapter_model.ckpt").is_file()
    texts = []
    for path, name in (("adapter",) * 2, ("pirate.gguf", "pirate"), ("g/g.gguf", "g"), ("m", "m")):
        served = ["verbosity=0", "run_mode=slora", *TINY, f"adapter_path={path}"]
        asked = ["predict_data=1: ", f"adapter_id={name}", "max_new_tokens=3"]
        assert main([*served, *asked]) == 0
        result = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
        texts.append([one["token_ids"] for one in result["results"]])
    assert all(text == texts[0] for text in texts)
    again = [*RUN, *given, "finetune_output=g", "overwrite=true"]
    assert main([*again, "convert_format=huggingface"]) == 0  # with the adapter merged
    assert [file.name for file in Path("g").iterdir()] == ["model.safetensors", "config.json"]
    merged = ["verbosity=0", "run_mode=predict", "model=tiny_llama", "load_checkpoint=g"]
    assert main([*merged, "predict_data=1: ", "max_new_tokens=3"]) == 0
    result = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
    assert [one["token_ids"] for one in result["results"]] == texts[0]
    assert main(again) == 0
    assert sorted(file.name for file in Path("g").iterdir()) == files


def test_the_model_that_is_trained_is_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["finetune.steps=1", "convert_format=huggingface", "finetune_output=m"]
    assert main([*RUN, *given]) == 0
    before = sorted(file.name for file in Path("m").iterdir())
    own = ["model=tiny_llama", "load_checkpoint=m", "finetune_output=m", "overwrite=true"]
    refused([*(one for one in RUN if one not in TINY), *own], 2)
    assert "m holds the model that is trained" in capsys.readouterr().err
    assert sorted(file.name for file in Path("m").iterdir()) == before


def test_a_merged_model_is_written_before_anything_is_learned() -> None:
    """A warm-up begins with a rate of 0."""
    given = ["finetune.warmup_steps=2", "finetune.eval_data=data.jsonl", "finetune.eval_steps=1"]
    more = ["finetune.steps=2", "convert_format=huggingface", "finetune_output=out"]
    assert main([*RUN, *given, *more]) == 0
    assert Path("out/best/model.safetensors").is_file()


def test_the_best_adapter_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["finetune.learning_rate=0.02", "finetune.eval_data=data.jsonl", "verbosity=1"]
    more = ["finetune.steps=6", "finetune.eval_steps=2", "finetune.charts=true"]
    assert main([*RUN, *given, *more, "finetune_output=out", "finetune.shuffle=false"]) == 0
    evaluated = {line["step"]: line["eval_loss"] for line in metrics() if "eval_loss" in line}
    assert list(evaluated) == [2, 4, 6]
    # Of all examples, after the update: what the next step says of them before it.
    assert evaluated[2] == pytest.approx(metrics()[2]["loss"], rel=1e-5)
    best = min(evaluated, key=lambda step: evaluated[step])
    stderr = capsys.readouterr().err
    assert f"wrote out/best: step {best}, whose evaluation loss of {evaluated[best]:.4f}" in stderr
    assert "loss 5." in stderr and "█" in stderr
    names = {file.name.partition(".out.")[0] for file in Path("outputs/latest").iterdir()}
    assert {"loss.png", "loss.svg", "events", "metrics.jsonl"} <= names
    assert Path("out/best/adapter_config.json").is_file()
    alone = [
        "finetune.steps=1",
        "overwrite=true",
        "finetune.packing=true",
        "finetune.max_length=20",
    ]
    assert main([*RUN, *alone, "finetune_output=out"]) == 0
    assert metrics()[0]["tokens"] == 4 * 18  # two texts of 9
    assert not Path("out/best").exists()


@pytest.mark.usefixtures("light_msrun")
@pytest.mark.parametrize(
    ("keys", "file"),
    [
        (["finetune.lora.targets=all-linear"], "adapter_model.safetensors"),
        (["finetune.full=true", "finetune.save_steps=1"], "model.safetensors"),
    ],
)
def test_two_ranks_train_as_one_process(keys: list[str], file: str) -> None:
    given = ["finetune.steps=3", "finetune.learning_rate=0.02", "finetune.eval_data=data.jsonl"]
    losses, written = [], []
    for name in ("single", "tp2"):
        ranks = [f"parallel={name}", "parallel.rendezvous_timeout=600"]
        more = [*keys, f"finetune_output={name}"]
        assert main([*RUN, *given, *more, *(ranks if name != "single" else [])]) == 0
        losses.append([line[key] for line in metrics() for key in line if "loss" in key])
        assert not Path(name, "checkpoint.safetensors").exists()
        assert Path(name, "best", file).is_file()
        written.append(open_safetensors(Path(name, file)))
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, one in written[0].items():
        np.testing.assert_allclose(written[1][name].float32(), one.float32(), atol=5e-4)


def test_an_adapter_is_trained_further(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["finetune.steps=2", "finetune.learning_rate=0.02", "finetune.shuffle=false"]
    assert main([*RUN, *given, "finetune_output=one", "verbosity=1"]) == 0
    assert any(line.startswith("loss ") for line in capsys.readouterr().err.splitlines())
    assert main([*RUN, *given, "finetune_output=two", "finetune.init_adapter=one"]) == 0
    assert metrics()[0]["loss"] != pytest.approx(5.6, abs=0.01)
    one, two = (open_safetensors(Path(n, "adapter_model.safetensors")) for n in ("one", "two"))
    assert one.keys() == two.keys()


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gpt2"])
def test_an_adapter_of_a_quantized_base(model: str) -> None:
    given = [f"model={model}", "finetune.steps=3", "finetune.shuffle=false", "overwrite=true"]
    losses = []
    for quant, dtype in (("none", "float32"), ("a16w8", "float32"), ("a16w8", "stored")):
        words = ["finetune_output=q", f"quant={quant}", f"finetune.dtype={dtype}"]
        assert main([*RUN, *given, *words]) == 0
        losses.append([line["loss"] for line in metrics()])
    assert losses[0] != losses[1]
    assert losses[2] == losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_the_whole_model_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["finetune.full=true", "finetune.steps=20", "finetune.learning_rate=0.01"]
    assert main([*RUN, *given, "finetune_output=model"]) == 0
    assert metrics()[-1]["loss"] < metrics()[0]["loss"] / 2
    capsys.readouterr()
    again = ["verbosity=0", "model=tiny_llama", "load_checkpoint=model", "predict_data=1: "]
    assert main([*again, "max_new_tokens=5"]) == 0
    assert "11111" in capsys.readouterr().out


def test_a_dry_run_says_tokens_steps_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["finetune.steps=6", "finetune_output=adapter", "dry_run=true"]
    assert main([*RUN, *given]) == 0
    stdout = capsys.readouterr().out
    assert "4 of 4 examples, 36 tokens, 24 of them targets" in stdout
    assert "6 of 4 examples, 6.00 epochs, about 216 tokens" in stdout
    assert "memory" in stdout
    estimate = r"about \d+ s, an estimate: [\d.]+ GFLOP of matrix products, at the \d+ GFLOP/s"
    assert re.search(estimate, stdout)
    assert not Path("adapter").exists()


def test_a_training_is_the_same_in_its_config_yaml(resolve: Callable[..., Any]) -> None:
    """Whose paths are from the root: it is resumed with either."""
    Path("base").mkdir()
    line = [*RUN[1:-3], "model=tiny_llama", "finetune_output=a"]

    def identity(source: str) -> str:
        config = resolve(*line, f"load_checkpoint={source}")
        return finetune._identity(config, SimpleNamespace(texts=()), ())  # type: ignore[arg-type]

    given = ["base", str(Path("base").absolute()), "hf://a/b", "random"]
    assert [identity(one) == identity("./base") for one in given] == [True, True, False, False]


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_training_goes_on_to_the_same_bits(kill: signal.Signals) -> None:
    given = [
        *("finetune.steps=30", "finetune.learning_rate=0.01", "finetune.lora.dropout=0.2"),
        *("finetune.save_steps=1", "seed=5", "finetune.schedule=cosine"),
    ]
    command = [sys.executable, str(ROOT / "run_lite.py"), *RUN, *given, "finetune_output=cut"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    checkpoint = Path("cut/checkpoint.safetensors")
    deadline = time.monotonic() + 60
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(kill)
    code = process.wait(60)
    process.stderr.close()  # type: ignore[union-attr]
    assert code in (-9, 130, 0)
    assert main([*RUN, *given, "finetune_output=cut", "finetune.resume=true"]) == 0
    assert main([*RUN, *given, "finetune_output=whole"]) == 0
    cut, whole = (
        open_safetensors(Path(name, "adapter_model.safetensors")) for name in ("cut", "whole")
    )
    assert all(np.array_equal(cut[name].read(), one.read()) for name, one in whole.items())
    assert not checkpoint.exists()
    refused([*RUN, *given, "finetune_output=cut", "finetune.resume=true"], 2)  # it is complete


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["finetune.data="], "finetune.data is empty"),
        (["finetune.data=none.jsonl"], "finetune.data: no file or folder none.jsonl"),
        (["finetune.eval_data=none.jsonl"], "finetune.eval_data: no file or folder none.jsonl"),
        (["finetune.init_adapter=none"], "finetune.init_adapter: no file or folder none"),
        (["finetune.early_stop=2"], "finetune.early_stop=2 has an effect only with"),
        (["finetune.take=0"], "finetune.take"),
        (["finetune.learning_rate=1e39"], "finetune.learning_rate: got 1e+39, expected"),
        (["parallel=tp2", "model=deepseek_v2_lite"], "has latent attention, which is not divided"),
        (["finetune_output="], "finetune_output is empty"),
        (["finetune.warmup_steps=9"], "finetune.warmup_steps: got 9, expected at most the 8"),
        (["finetune.lora.targets=[]"], "finetune.lora.targets: an empty list"),
        (
            ["finetune.full=true", "finetune.init_adapter=x"],
            "finetune.init_adapter= is an adapter to train",
        ),
        (
            ["finetune.full=true", "finetune.dtype=bfloat16"],
            "finetune.dtype=bfloat16 is the type of weights that are not trained",
        ),
        (["finetune.full=true", "convert_format=gguf"], "convert_format=gguf is for adapters"),
        (["backend=ms"], "backend=ms is not available with run_mode=finetune"),
        (["context.device_target=Ascend"], "context.device_target=Ascend is not available"),
        (["finetune.max_length=100000"], "finetune.max_length: got 100000, expected at most"),
    ],
)
def test_runs_that_cannot_be(
    changes: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused([*RUN, "finetune.steps=8", "finetune_output=out", *changes], 2)
    assert message in capsys.readouterr().err


def test_keys_without_effect_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    dry = [*RUN, "verbosity=1", "dry_run=true", "finetune_output=out", "finetune.lora.dropout=0.5"]
    assert main([*dry, "finetune.lora.r=4", "finetune.steps=1", "finetune.schedule=linear"]) == 0
    assert "no effect" not in capsys.readouterr().err
    lora = ["finetune.lora.r=4", "finetune.lora.targets=[o_proj]"]
    assert main([*dry, *lora, "finetune.full=true", "finetune.epochs=7", "finetune.steps=1"]) == 0
    stderr = capsys.readouterr().err
    assert "finetune.epochs=7.0: no effect with finetune.steps=1\n" in stderr
    assert "finetune.lora.r=4, finetune.lora.dropout=0.5, finetune.lora.targets=" in stderr
    assert main([*RUN, "finetune.steps=1", "finetune_output=one"]) == 0
    assert main([*dry, "finetune.lora.r=4", "finetune.init_adapter=one"]) == 0
    assert "finetune.lora.r=4: no effect with finetune.init_adapter=one" in capsys.readouterr().err


def test_a_warm_up_is_no_longer_than_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["finetune.epochs=2", "finetune_output=out", "finetune.warmup_steps=3"]
    refused([*RUN, *given], 2)
    expected = "finetune.warmup_steps: got 3, expected at most 2, the steps of finetune.epochs=2\n"
    assert expected in capsys.readouterr().err


def test_a_normed_head_is_not_trained(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["run_mode=finetune", "model=baichuan2_7b", "finetune.data=data.jsonl", "dry_run=true"]
    assert main([*given, "finetune_output=out", "finetune.full=true"]) == 2
    assert "whose rows are divided by their lengths" in capsys.readouterr().err
    assert main([*given, "finetune_output=out", "finetune.full=false"]) == 0
