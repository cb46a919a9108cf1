"""The training loop: the order of examples, dropout, threads, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.errors import ArtifactError, NonFiniteError
from lite_runner.training.adapter import TrainedLora, new_lora
from lite_runner.training.network import Example, TrainedNetwork
from lite_runner.training.options import LoraOptions
from lite_runner.training.trainer import Trainer, blas_threads
from tests.models import reference_model
from tests.training.options import OPTIONS
from tests.training.test_network import examples, options, weights_of

MODEL = reference_model("llama")


def trainer(
    texts: list[Example] | None = None, *, dropout: float = 0.0, threads: int = 2, **changes: Any
) -> tuple[Trainer, TrainedLora]:
    lora = new_lora(MODEL, LoraOptions(r=4, alpha=8.0, dropout=0, targets=None, rslora=False), 0)
    network = TrainedNetwork(MODEL, weights_of("llama"), lora.arrays, lora.deltas)
    given = {**OPTIONS, "steps": 6, "batch_size": 3, "learning_rate": 0.01, **changes}
    given["lora"] = {**OPTIONS["lora"], "dropout": dropout}
    texts = examples(MODEL.vocab_size) if texts is None else texts
    made = Trainer(network, texts, options(given), seed=1, threads=threads, identity="x")
    return made, lora


def test_each_epoch_has_every_example_once_in_another_order() -> None:
    made, _ = trainer()
    epochs = [[made.example(12 * epoch + i) for i in range(12)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]
    plain, _ = trainer(shuffle=False)
    assert [plain.example(i) for i in range(14)] == [*range(12), 0, 1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_threads_change_nothing(dropout: float) -> None:
    """Not a bit, though they compute other chunks."""
    one, first = trainer(dropout=dropout, threads=1)
    two, second = trainer(dropout=dropout, threads=2)
    assert [step.loss for step in one.run()] == [step.loss for step in two.run()]
    assert all(np.array_equal(first.arrays[name], second.arrays[name]) for name in first.arrays)


def test_accumulated_batches_are_one() -> None:
    whole, _ = trainer(batch_size=6)
    parts, _ = trainer(batch_size=2, accumulate=3)
    assert [s.loss for s in whole.run()] == [s.loss for s in parts.run()]


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_training_is_the_same_to_the_bit(stop: int, tmp_path: Path) -> None:
    whole, expected = trainer(dropout=0.3, schedule="cosine")
    losses = [step.loss for step in whole.run()]
    cut, _ = trainer(dropout=0.3, schedule="cosine")
    stepping = cut.run()
    for _ in range(stop):
        next(stepping)
    cut.save(tmp_path / "c.safetensors")
    stepping.close()
    again, found = trainer(dropout=0.3, schedule="cosine")
    again.resume(tmp_path / "c.safetensors")
    assert [step.loss for step in again.run()] == losses[stop:]
    assert all(np.array_equal(found.arrays[name], one) for name, one in expected.arrays.items())


def test_a_checkpoint_of_another_training(tmp_path: Path) -> None:
    made, _ = trainer()
    made.save(tmp_path / "c.safetensors")
    other, _ = trainer()
    other.identity = "y"
    with pytest.raises(ArtifactError, match="a checkpoint of another model, data or settings"):
        other.resume(tmp_path / "c.safetensors")


def test_a_loss_that_is_no_number_ends_it() -> None:
    made, lora = trainer()
    next(iter(lora.arrays.values()))[...] = np.nan
    with pytest.raises(NonFiniteError, match="step 1: the loss is nan"):
        next(made.run())


def test_all_weights_are_trained() -> None:
    weights = {name: one.copy() for name, one in weights_of("llama").items()}
    before = {name: one.copy() for name, one in weights.items()}
    network = TrainedNetwork(MODEL, weights, weights, {})
    given = {**OPTIONS, "steps": 8, "learning_rate": 0.01, "full": True}
    made = Trainer(network, examples(MODEL.vocab_size)[:4], options(given), seed=0)
    losses = [step.loss for step in made.run()]
    assert losses[-1] < losses[0] / 2
    assert all(not np.array_equal(before[name], one) for name, one in weights.items())


def test_blas_has_its_threads_again() -> None:
    import lite_runner.training.trainer as module

    with blas_threads(1):
        found = module._openblas()
        assert found is None or found[0]() == 1
