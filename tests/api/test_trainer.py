"""Trainer: export and predict over the same code as the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner import (
    AutoModel,
    InferTask,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    pipeline,
)
from lite_runner.api.infer import infer_config
from lite_runner.errors import ConfigError
from lite_runner.export.manifest import read_manifest


def test_export_then_run_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lite_python: Path
) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(lite_python))
    args = TrainingArguments(output_dir=tmp_path / "out", num_train_epochs=1, batch_size=2)
    config = LlamaConfig(num_layers=2, hidden_size=32, num_heads=2, seq_length=64, vocab_size=320)
    model = LlamaForCausalLM(config)
    task = Trainer(task="text_generation", model=model, args=args)
    folder = task.export()
    assert folder == tmp_path / "out" / "llama2_7b_mindir"
    manifest = read_manifest(folder)
    assert (manifest.model.hidden_size, manifest.source) == (32, "random")
    with pytest.raises(ConfigError, match="exists already"):
        task.export()
    options = {"max_new_tokens": 5, "eos_token_id": []}
    online = task.predict(input_data=["some words", "others"], **options)
    assert len(online) == 2 and online == pipeline("text_generation", model)(
        ["some words", "others"], **options
    )
    found, _ = infer_config(folder, {"infer_seq_length": 64})
    with_lite = InferTask.get_infer_task("text_generation", found, tokenizer=model.tokenizer)
    assert with_lite(["some words", "others"], **options) == online


def test_the_batch_size_of_the_model_holds_for_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exported = []
    monkeypatch.setattr("lite_runner.launch.launch", exported.append)
    model = AutoModel.from_pretrained("tiny_llama", batch_size=3)
    assert Trainer(model=model).export() == Path("outputs/tiny_llama_mindir")
    Trainer(TrainingArguments(batch_size=2), model=model).export(overwrite=True)
    assert [(run.predict_batch_size, run.overwrite) for run in exported] == [(3, False), (2, True)]
    assert {run.run_mode for run in exported} == {"export"}


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="batch_size: got 0"):
        TrainingArguments(batch_size=0)
    with pytest.raises(ConfigError, match="no model given"):
        Trainer()
    with pytest.raises(ConfigError, match="did you mean text_generation"):
        Trainer(task="text_generations", model="tiny_llama")
    with pytest.raises(TypeError, match="learning_rate"):
        TrainingArguments(learning_rate=1e-4)  # type: ignore[call-arg]
