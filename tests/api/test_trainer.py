"""Trainer: export and predict over the same code as the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lite_runner import (
    AutoConfig,
    AutoModel,
    InferTask,
    LlamaConfig,
    LlamaForCausalLM,
    LoraConfig,
    Trainer,
    TrainingArguments,
    pipeline,
)
from lite_runner.api.exported import infer_config
from lite_runner.errors import ConfigError
from lite_runner.mindir.manifest import MANIFEST, read_manifest
from lite_runner.training.options import LoraOptions
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.layouts import random_checkpoint


@pytest.mark.usefixtures("unverified")
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
    assert task.export() == folder  # again, as in MindFormers
    assert read_manifest(folder).files.keys() == manifest.files.keys()
    (folder / MANIFEST).rename(tmp_path / MANIFEST)
    with pytest.raises(ConfigError, match="exists already"):
        task.export()  # it is no export
    (tmp_path / MANIFEST).rename(folder / MANIFEST)
    options = {"max_new_tokens": 5, "eos_token_id": []}
    online = task.predict(input_data=["some words", "others"], **options)
    assert len(online) == 2 and online == pipeline("text_generation", model)(
        ["some words", "others"], **options
    )
    found, _ = infer_config(folder, {"infer_seq_length": 64})
    with_lite = InferTask.get_infer_task("text_generation", found, tokenizer=model.tokenizer)
    assert with_lite(["some words", "others"], **options) == online


def test_the_batch_size_of_the_model_holds_for_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = []
    monkeypatch.setattr("lite_runner.launch.launch", exported.append)
    model = AutoModel.from_pretrained("tiny_llama", batch_size=3)
    assert Trainer(model=model).export() == Path("outputs/tiny_llama_mindir")
    Trainer(TrainingArguments(batch_size=2), model=model).export(overwrite=True)
    assert [(run.predict_batch_size, run.overwrite) for run in exported] == [(3, False), (2, True)]
    assert {run.run_mode for run in exported} == {"export"}


@pytest.mark.parametrize("method", ["lora", ""])
def test_training_follows_its_arguments(method: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1", "completion": "22"}\n', encoding="utf-8")
    settings = {"learning_rate": 0.02, "total_steps": 3, "lr_scheduler_type": "cosine"}
    args = TrainingArguments(output_dir=tmp_path / "out", batch_size=1, seed=3, **settings)
    model = AutoModel.from_pretrained("tiny_llama", num_layers=1)
    trainer = Trainer(args, model=model, train_dataset=tmp_path / "data.jsonl", pet_method=method)
    folder = trainer.finetune()
    lines = (tmp_path / "out/latest/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [json.loads(line)["learning_rate"] for line in lines]
    assert rates == pytest.approx([0.02, 0.015, 0.005])
    names = {"lora": "adapter_model.safetensors", "": "model.safetensors"}
    assert folder.parent == tmp_path / "out" and (folder / names[method]).is_file()
    with pytest.raises(ConfigError, match="exists already"):
        trainer.finetune()
    assert trainer.train(overwrite=True) == folder  # from the start


def test_an_adapter_is_that_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pet_config of the model says what is trained, as that of a yaml does."""
    trained: list[Any] = []
    monkeypatch.setattr("lite_runner.launch.launch", trained.append)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data.jsonl").write_text('{"text": "1"}\n', encoding="utf-8")
    args = TrainingArguments("~/out", total_steps=1, optim="sgd", warmup_ratio=0.5, do_eval=False)
    for targets in (r".*\.wo|x{1,2}[a,b]: #'", ["wq", "wo"]):
        config = AutoConfig.from_pretrained("tiny_llama")
        pet = LoraConfig(lora_rank=2, lora_alpha=64, lora_dropout=0.5, target_modules=targets)
        config.pet_config = pet
        trainer = Trainer(args, model=config, train_dataset="~/data.jsonl")
        assert trainer.finetune() == tmp_path / "out/tiny_llama_lora"
        found = trained[-1].finetune
        assert (found.full, found.steps) == (False, 1)
        wanted = tuple(targets) if isinstance(targets, list) else targets
        assert found.lora == LoraOptions(2, 64.0, 0.5, wanted, False)
        assert (
            "no effect here, of TrainingArguments: optim, warmup_ratio" in capsys.readouterr().err
        )


def test_invalid_arguments() -> None:
    with pytest.raises(ConfigError, match="batch_size: got 0"):
        TrainingArguments(batch_size=0)
    with pytest.raises(ConfigError, match="no model given"):
        Trainer()
    with pytest.raises(ConfigError, match="did you mean text_generation"):
        Trainer(task="text_generations", model="tiny_llama")
    with pytest.raises(ConfigError, match="did you mean learning_rate"):
        TrainingArguments(learning_rat=1e-4)
    with pytest.raises(ConfigError, match=r"init_context\(use_parallel=True\)"):
        TrainingArguments(use_parallel=True)
    with pytest.raises(ConfigError, match=r"callback: no such setting; did you mean callbacks\?"):
        Trainer(model="tiny_llama", callback=[])
    with pytest.raises(ConfigError, match="image_processor has no effect with text_generation"):
        Trainer(model="tiny_llama", image_processor=object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pet_method: got 'ptuning', expected lora"):
        Trainer(model="tiny_llama", pet_method="ptuning")


def test_training_arguments_are_accepted() -> None:
    args = TrainingArguments(
        num_train_epochs=1, batch_size=2, learning_rate=1e-3, use_parallel=False
    )
    trainer = Trainer(
        args=args,
        task="text_generation",
        model_name="tiny_llama",
        train_dataset=None,
        eval_dataset=object(),
        image_processor=None,
        callbacks=[object()],
    )
    for train in (trainer.train, trainer.finetune):
        with pytest.raises(ConfigError, match="needs a train_dataset, the path of a file"):
            train()
    with pytest.raises(ConfigError, match="eval_dataset: got <object"):
        trainer.evaluate()


def test_evaluating(tmp_path: Path) -> None:
    """By MindFormers' metrics, over the file of a yaml or of the call."""
    (tmp_path / "texts.jsonl").write_text('{"text": "some words"}\n{"text": "a few more"}\n')
    (tmp_path / "words.txt").write_text("some words and a few more", "utf-8")
    document = '{"context": "c", "question": "q?", "answers": {"text": ["a"]}}'
    (tmp_path / "squad.jsonl").write_text(document, "utf-8")
    (tmp_path / "eval.yml").write_text(
        "trainer: {model_name: tiny_llama}\nmetric: {type: PerplexityMetric}\n"
        f"eval_dataset: {{data_loader: {{dataset_dir: {tmp_path}/texts.jsonl}}}}\n"
    )
    trainer = Trainer(str(tmp_path / "eval.yml"))
    found = trainer.evaluate()
    assert found["token_perplexity"] > 1 and found["perplexity"] > found["token_perplexity"]
    found = trainer.evaluate(eval_dataset=tmp_path / "words.txt")
    assert found["PPL"] == pytest.approx(math.exp(found["loss"]))
    trainer.model.config.update({"seq_length": 512})
    found = trainer.evaluate(eval_dataset=tmp_path / "squad.jsonl", metric_name="EmF1Metric")
    assert found == {"em": 0, "em_f1": 0}
    with pytest.raises(ConfigError, match=r"metric.type: got 'Accuracy'"):
        trainer.evaluate(metric_name="Accuracy")


def test_a_yaml_a_seed_and_another_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "predict.yaml").write_text("trainer: {model_name: tiny_llama}\n")
    trainer = Trainer(str(tmp_path / "predict.yaml"), "text_generation")
    options = {"max_new_tokens": 8, "eos_token_id": []}
    own = trainer.predict(input_data="some words", **options)
    assert own == pipeline("text_generation", "tiny_llama")("some words", **options)
    config = trainer.model.config.run_config().model_config()
    assert config is not None
    write_ckpt(tmp_path / "other.ckpt", random_checkpoint(config, seed=7))
    path = str(tmp_path / "other.ckpt")
    other = trainer.predict(predict_checkpoint=path, input_data="some words", **options)
    model = AutoModel.from_pretrained("tiny_llama", checkpoint_name_or_path=path)
    assert own != other == pipeline("text_generation", model)("some words", **options)
    seeded = Trainer(TrainingArguments(seed=5), model=model)
    options = {**options, "do_sample": True, "temperature": 3.0}
    drawn = [seeded.predict(input_data="a", **options, seed=seed) for seed in (5, 6)]
    assert seeded.predict(input_data="a", **options) == drawn[0] != drawn[1]
