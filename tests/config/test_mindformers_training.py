"""Sections of a MindFormers yaml for training and evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lite_runner.config.argv import parse
from lite_runner.config.mindformers_training import with_evaluation, with_training
from lite_runner.errors import ConfigError
from lite_runner.run_modes import heads, resolve
from lite_runner.run_modes.eval import Config as EvalConfig
from lite_runner.training.options import TrainOptions

YAML = """
runner_config: {epochs: 2, batch_size: 8, sink_mode: true, gradient_accumulation_steps: 4}
optimizer: {type: FP32StateAdamWeightDecay, betas: [0.9, 0.95], eps: 1.e-8, weight_decay: 0.1}
lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 1.e-5, warmup_ratio: 0.03, total_steps: 100}
runner_wrapper: {type: MFTrainOneStepCell, use_clip_grad: true}
train_dataset:
  data_loader: {type: HFDataLoader, dataset_dir: train.json, shuffle: false}
model:
  model_config:
    pet_config: {pet_type: lora, lora_rank: 16, lora_alpha: 32, lora_dropout: 0.05,
      target_modules: '.*wq|.*wk|.*wv|.*wo'}
"""


def test_the_keys_of_a_training() -> None:
    raw, notes, faults = with_training(yaml.safe_load(YAML))
    assert raw["finetune"] == {
        **{"epochs": 2, "batch_size": 8, "accumulate": 4, "weight_decay": 0.1, "steps": 100},
        **{"learning_rate": 1e-5, "schedule": "cosine", "warmup_steps": 3, "shuffle": False},
        "data": "train.json",
        "lora": {"r": 16, "alpha": 32, "dropout": 0.05, "targets": ".*wq|.*wk|.*wv|.*wo"},
    }
    assert notes == ["optimizer.betas=[0.9, 0.95] is ignored: it is [0.9, 0.999] here"]
    assert faults == []
    assert raw["model"] == {"model_config": {}}


def test_an_evaluation_during_the_training() -> None:
    given = yaml.safe_load(YAML) | {
        "do_eval": True,
        "eval_step_interval": 50,
        "eval_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": "held_out.json"}},
        "metric": {"type": "PerplexityMetric"},
    }
    raw, _, faults = with_training(given)
    asked = raw["finetune"]
    assert (asked["eval_data"], asked["eval_steps"]) == ("held_out.json", 50)
    assert "eval_dataset" not in raw and faults == []
    raw, notes, _ = with_training(given | {"eval_step_interval": -1, "eval_epoch_interval": 4})
    assert "eval_steps" not in raw["finetune"]
    assert any("eval_epoch_interval=4 is ignored" in note for note in notes)
    raw, notes, _ = with_training(given | {"eval_dataset": None})
    assert "eval_data" not in raw["finetune"]
    assert any("do_eval=true: eval_dataset.data_loader.dataset_dir is null" in n for n in notes)
    raw, _, _ = with_training(given | {"do_eval": False})
    assert "eval_data" not in raw["finetune"] and "eval_dataset" in raw


def test_the_length_of_texts_is_the_model_s() -> None:
    given = yaml.safe_load(YAML)
    given["model"]["model_config"]["seq_length"] = 48
    raw, _, _ = with_training(given)
    assert raw["finetune"]["max_length"] == 48
    assert raw["model"]["model_config"] == {"seq_length": 48}


def test_handlers_of_a_loader() -> None:
    """A HFDataLoader of a local file, as MindFormers' documents have it."""
    loader = {"type": "HFDataLoader", "load_func": "load_dataset", "path": "json"}
    packing = {"type": "PackingHandler", "seq_length": 64, "pack_strategy": "pack"}
    handlers = [{"type": "take", "n": 4}, {"type": "AlpacaInstructDataHandler"}, packing]
    loader |= {"data_files": ["alpaca.json"], "split": "train", "handler": handlers}
    raw, notes, faults = with_training({"train_dataset": {"data_loader": loader}})
    asked = {"data": "alpaca.json", "template": "alpaca", "packing": True, "max_length": 64}
    assert raw == {"finetune": {**asked, "take": 4}} and faults == []
    assert [note.partition(":")[0] for note in notes] == ["AlpacaInstructDataHandler"]
    others = [{"type": "take", "n": 9}, {"type": "skip", "n": 2}, {"type": "sort", "by": "x"}]
    given = {"train_dataset": {"data_loader": {**loader, "handler": others}}}
    raw, notes, _ = with_training(given)
    assert (raw["finetune"]["skip"], raw["finetune"]["take"]) == (2, 7)
    assert ["'sort' is ignored" in note for note in notes] == [True]
    loader |= {"path": "someone/alpaca", "data_files": None, "handler": handlers[1]}
    loader = {"train_dataset": {"data_loader": loader}}
    raw, _, faults = with_training(loader)
    assert raw == {"finetune": {"template": "alpaca"}}
    assert "data_loader.path: got 'someone/alpaca' of HFDataLoader, which is not" in faults[0]
    assert with_training(loader, has_data=True)[2] == []


def test_a_folder_and_its_checkpoints() -> None:
    """MindDataset's folder of files, and CheckpointMointor's steps, resumed."""
    loader = {"type": "MindDataset", "dataset_dir": "data/belle", "num_samples": 100}
    callbacks = [
        {"type": "MFLossMonitor"},
        {"type": "CheckpointMointor", "save_checkpoint_steps": 9},
    ]
    given = {"train_dataset": {"data_loader": loader}, "callbacks": callbacks}
    raw, notes, faults = with_training({**given, "resume_training": True})
    asked = {"data": "data/belle", "take": 100, "save_steps": 9, "resume": True}
    assert raw["finetune"] == asked and not notes and not faults
    # What is of another type is left to the reader of the key.
    loader |= {"num_samples": "100", "handler": [{"type": "take", "n": 3}]}
    raw, *_ = with_training({**given, "callbacks": 5})
    assert raw["finetune"] == {"data": "data/belle", "take": "100"}


def test_keys_without_a_counterpart_are_named() -> None:
    text = """
    optimizer: {type: Came}
    lr_schedule: {type: PolynomialWithWarmUpLR, total_steps: -1, warmup_ratio: 0.1}
    train_dataset: {data_loader: {type: MindDataset, dataset_dir: data.tfrecord}}
    """
    raw, notes, faults = with_training(yaml.safe_load(text))
    assert raw["finetune"] == {"full": True}
    assert [one.partition(":")[0] for one in faults] == [
        *("lr_schedule.type", "optimizer.type", "train_dataset.data_loader.dataset_dir")
    ]
    assert "lr_schedule.warmup_ratio=0.1 needs lr_schedule.total_steps" in notes[0]


def test_a_yaml_with_flags_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora.yaml").write_text(YAML, encoding="utf-8")
    (tmp_path / "train.json").write_text('{"text": "x"}', encoding="utf-8")
    words = ["model=tiny_llama", "--config", "lora.yaml", "--run_mode", "finetune"]
    more = ["--batch_size", "2", "finetune.steps=7", "finetune_output=out"]
    config, notes = resolve(parse([*words, *more], heads()))
    assert isinstance(config, TrainOptions)
    asked = config.finetune
    assert (asked.steps, asked.batch_size, asked.accumulate) == (7, 2, 4)
    assert (asked.lora.r, asked.lora.targets) == (16, ".*wq|.*wk|.*wv|.*wo")
    assert config.source.pet is None
    assert any("optimizer.betas" in note.text for note in notes)
    with pytest.raises(ConfigError, match="finetune_output is empty"):
        resolve(parse([*words, "--batch_size", "2"], heads()))
    (tmp_path / "lora.yaml").write_text(f"{YAML}callbacks: 5\n".replace("Cosine", "Polynomial"))
    with pytest.raises(ConfigError, match=r"lr_schedule\.type.* \(in lora\.yaml\)"):
        resolve(parse([*words, *more], heads()))


@pytest.mark.parametrize(
    ("words", "full", "checkpoint"),
    [
        (["--config", "a.yaml", "--run_mode", "train"], False, "random"),
        (["--config", "a.yaml", "--run_mode", "train", "load_checkpoint=x.ckpt"], False, "x.ckpt"),
        (["--config", "b.yaml"], True, "y.ckpt"),
        (["run_mode=train"], True, "random"),
        (["run_mode=train", "finetune.full=false"], False, "random"),
    ],
)
def test_a_training_from_the_start(
    words: list[str], full: bool, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(YAML + "load_checkpoint: ''", encoding="utf-8")
    (tmp_path / "b.yaml").write_text("{run_mode: train, load_checkpoint: y.ckpt}", encoding="utf-8")
    (tmp_path / "train.json").write_text('{"text": "x"}', encoding="utf-8")
    more = ["model=tiny_llama", "finetune.data=train.json", "finetune_output=out"]
    config, notes = resolve(parse([*words, *more], heads()))
    assert isinstance(config, TrainOptions)
    assert (config.finetune.full, config.load_checkpoint) == (full, checkpoint)
    assert any("random weights" in note.text for note in notes) == (checkpoint == "random")


@pytest.mark.parametrize(
    ("metric", "data", "expected"),
    [
        ("PerplexityMetric", "a.txt", {"eval_data": "a.txt", "eval_window": 64}),
        ("PerplexityMetric", "a.jsonl", {"eval": {"tasks": "texts", "data": "a.jsonl"}}),
        ("EmF1Metric", "a.csv", {"eval": {"tasks": "squad", "data": "a.csv"}}),
        ("ADGENMetric", "dev.json", {"eval": {"tasks": "adgen", "data": "dev.json"}}),
        ("ADGENMetric", "a.mindrecord", "file of JSON lines or CSV is"),
        ("SQuADMetric", "a.jsonl", "metric.type: got 'SQuADMetric', expected one of"),
        ("ADGENMetric", "", {}),
    ],
)
def test_the_keys_of_an_evaluation(metric: str, data: str, expected: object) -> None:
    model = {"model": {"model_config": {"seq_length": 64}}}
    of_data = {"data_loader": {"dataset_dir": data}}
    raw = {**model, "metric": {"type": metric}, "eval_dataset": of_data}
    found, notes = with_evaluation(raw)
    if isinstance(expected, str):
        assert found == raw and expected in notes[0]
    else:
        assert notes == [] and found == ({**model, **expected} if data else raw)


def test_other_columns_are_a_task_of_ones_own() -> None:
    loader = {"dataset_dir": "dev.json", "origin_columns": ["a", "b"]}
    raw = {"metric": {"type": "ADGENMetric"}, "eval_dataset": {"data_loader": loader}}
    _, notes = with_evaluation(raw)
    assert "eval.tasks=TASK.yaml" in notes[0]


def test_flags_of_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dev.jsonl").write_text("{}", encoding="utf-8")
    (tmp_path / "eval.yaml").write_text("metric: {type: EmF1Metric}", encoding="utf-8")
    words = ["model=tiny_llama", "--config", "eval.yaml", "--run_mode", "eval"]
    config, _ = resolve(parse([*words, "--eval_dataset_dir", "dev.jsonl"], heads()))
    assert isinstance(config, EvalConfig)
    assert (config.eval.tasks, config.eval.data) == (("squad",), "dev.jsonl")
