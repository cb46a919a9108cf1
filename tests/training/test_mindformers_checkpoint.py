"""Trainings that the real MindFormers saved, gone on with here; what is written has its form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.app import main
from lite_runner.errors import ArtifactError
from lite_runner.training.mindformers_checkpoint import (
    SavedTraining,
    checkpoint_file,
    open_training,
    write_training,
)
from lite_runner.training.network import Example, TrainedNetwork
from lite_runner.training.options import LoraOptions
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.safetensors_file import StoredTensor
from tests.paths import FIXTURES
from tests.run_modes.test_finetune import metrics
from tests.test_real_mindformers import CONFIGS

FOLDER = FIXTURES / "mindformers/llama"
MODEL = CONFIGS["llama"]
LORA = LoraOptions(r=3, alpha=6.0, dropout=0.0, targets=None, rslora=False)


def saved_training(kind: str) -> SavedTraining:
    saved = open_training(FOLDER / f"training_{kind}.ckpt", MODEL, LORA)
    assert saved is not None
    return saved


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_checkpoint_of_mindformers_has_its_loss_and_moments(kind: str) -> None:
    saved = saved_training(kind)
    assert saved.step == 4  # its global_step is 0: this optimizer does not count
    weights = {name: one.float32().copy() for name, one in saved.base.items()}
    lora = saved.lora
    trained, deltas = (weights, {}) if lora is None else (lora.arrays, lora.deltas)
    assert saved.first.keys() == saved.second.keys() == trained.keys()
    second = [one.float32() for one in saved.second.values()]
    assert all(np.all(one >= 0) and one.any() for one in second)
    network = TrainedNetwork(MODEL, weights, trained, deltas)
    expected = np.load(FOLDER / "training.npz")
    texts = [Example(ids.astype(np.int64), 1) for ids in expected["ids"][:2]]
    loss = network.loss(texts) / sum(text.targets for text in texts)
    assert loss == pytest.approx(float(expected[f"{kind}_loss"]), rel=1e-5)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_written_checkpoint_equals_mindformers(kind: str, tmp_path: Path) -> None:
    """Tensor by tensor, but for the learning rate."""
    saved, path = saved_training(kind), tmp_path / "x.ckpt"
    moments = [
        {name: tensor.float32() for name, tensor in one.items()}
        for one in (saved.first, saved.second)
    ]
    write_training(path, MODEL, saved.base, saved.lora, moments, step=4, epoch=2)
    counters: dict[str, StoredTensor] = {}
    theirs = open_ckpt(saved.path)
    found = open_ckpt(path, counters)
    del theirs["learning_rate"]
    assert found.keys() == theirs.keys()
    for name, one in theirs.items():
        np.testing.assert_array_equal(found[name].read(), one.read(), err_msg=name)
    numbers = {name: np.frombuffer(one.data, np.int32).tolist() for name, one in counters.items()}
    assert numbers == {"global_step": [4], "step_num": [4], "epoch_num": [2]}
    import mindspore

    assert int(mindspore.load_checkpoint(str(path))["global_step"]) == 4


def test_a_training_of_all_weights_is_opened_without_reading_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LazyTensor, "float32", lambda one: pytest.fail(f"{one.shape} is read"))
    assert len(saved_training("full").second) > 1


def test_the_newest_checkpoint_of_a_folder(tmp_path: Path) -> None:
    assert checkpoint_file(tmp_path / "x.ckpt") == tmp_path / "x.ckpt"
    for rank, name in ((0, "a-1_1.ckpt"), (0, "a-1_2.ckpt")):
        path = tmp_path / f"rank_{rank}/{name}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    assert checkpoint_file(tmp_path).name == "a-1_2.ckpt"
    (tmp_path / "rank_1").mkdir()
    with pytest.raises(ArtifactError, match="2 checkpoints of 2 ranks"):
        checkpoint_file(tmp_path)


def test_a_training_is_gone_on_with_from_either_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps after MindFormers' checkpoint of ours are those of a training that was not stopped."""
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"text": "one two"}\n{"text": "three four"}\n' * 3)
    run = ["run_mode=finetune", "model=tiny_llama", "finetune.data=data.jsonl", "overwrite=true"]
    run += ["finetune.learning_rate=0.01", "finetune.charts=false", "finetune.batch_size=2"]
    for full in ("false", "true"):
        given = [*run, f"finetune.full={full}", "convert_format=ckpt", "finetune.save_steps=2"]
        start = ["load_checkpoint=random", "weights_seed=1"]
        assert main([*given, *start, "finetune.steps=2", f"finetune_output=first_{full}"]) == 0
        assert main([*given, *start, "finetune.steps=4", f"finetune_output=whole_{full}"]) == 0
        whole: list[Any] = [line["loss"] for line in metrics()]
        rest = [f"load_checkpoint=first_{full}/checkpoint", "finetune.resume=true"]
        rest += ["finetune.steps=4", "finetune_output=rest"]
        capsys.readouterr()
        assert main([*given, *rest]) == 0
        assert "resumed after step 2 of 4: first_" in capsys.readouterr().err
        assert [line["loss"] for line in metrics()] == whole[2:]
        assert Path(f"whole_{full}/whole_{full}.ckpt").stat().st_size > 100_000
    assert main([*run, *rest, "finetune.full=false"]) == 2
    assert "first_true_rank_0-1_2.ckpt is a training of all weights" in capsys.readouterr().err
