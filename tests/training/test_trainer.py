"""The training loop: the order of examples, dropout, threads, checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault, NonFiniteError
from lite_runner.training.adapter import TrainedLora, in_memory, new_lora
from lite_runner.training.network import Example, TrainedNetwork
from lite_runner.training.options import LoraOptions, Schedule
from lite_runner.training.trainer import ALONE, AdamW, Gather, StepMetrics, Trainer, clipped, rate
from tests.models import reference_model
from tests.training.options import OPTIONS
from tests.training.test_network import examples, options, weights_of

MODEL = reference_model("llama")


def trainer(
    packs: list[list[Example]] | None = None,
    *,
    dropout: float = 0.0,
    threads: int = 2,
    ranks: Ranks = ALONE,
    gather: Gather = lambda payload: [payload],
    interrupted: Callable[[], bool] = lambda: False,
    **changes: Any,
) -> tuple[Trainer, TrainedLora]:
    lora = new_lora(MODEL, LoraOptions(r=4, alpha=8.0, dropout=0, targets=None, rslora=False), 0)
    network = TrainedNetwork(MODEL, weights_of("llama"), lora.arrays, lora.deltas)
    given = {**OPTIONS, "steps": 6, "batch_size": 3, "learning_rate": 0.01, **changes}
    given["lora"] = {**OPTIONS["lora"], "dropout": dropout}
    texts = examples(MODEL.vocab_size)
    training = Trainer(
        network,
        [[text] for text in texts] if packs is None else packs,
        options(given),
        evaluated=texts[:5] if given["eval_data"] else (),
        seed=1,
        threads=threads,
        identity="x",
        ranks=ranks,
        gather=gather,
        interrupted=interrupted,
    )
    return training, lora


def on_two_ranks(
    work: Callable[[Trainer], list[StepMetrics]], stop_at: int = 0, **changes: Any
) -> list[tuple[list[StepMetrics], TrainedLora]]:
    """The results of `work` on two ranks, which are threads; the second is interrupted."""
    payloads: dict[int, bytes] = {}
    barrier = threading.Barrier(2, timeout=60)

    def rank(index: int) -> tuple[list[StepMetrics], TrainedLora]:
        def gather(payload: bytes) -> list[bytes]:
            payloads[index] = payload
            barrier.wait()
            found = [payloads[0], payloads[1]]
            barrier.wait()
            return found

        asked = iter(range(1, 100))
        training, lora = trainer(
            ranks=Ranks(index, data=2),
            gather=gather,
            threads=1,
            interrupted=lambda: index == 1 and next(asked) == stop_at,
            **changes,
        )
        return work(training), lora

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def test_each_epoch_has_every_example_once_in_another_order() -> None:
    training, _ = trainer()
    assert training.epoch_steps == training.eval_steps == 4
    epochs = [[training.example(12 * epoch + i) for i in range(12)] for epoch in (0, 1)]
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


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_two_ranks_are_one_with_twice_the_batch(dropout: float) -> None:
    given: dict[str, Any] = {"dropout": dropout, "eval_data": "x", "eval_steps": 2}
    one, expected = trainer(batch_size=4, **given)
    whole = list(one.run())
    (steps, lora), (others, other) = on_two_ranks(
        lambda training: list(training.run()), **given | {"batch_size": 2}
    )
    names = ("loss", "grad_norm", "eval_loss", "tokens")
    for name in names[:3]:
        values = [getattr(step, name) for step in whole if getattr(step, name) is not None]
        found = [getattr(step, name) for step in steps if getattr(step, name) is not None]
        assert found == pytest.approx(values, rel=1e-5)
        assert found == [getattr(s, name) for s in others if getattr(s, name) is not None]
    assert [step.tokens for step in steps] == [step.tokens for step in whole]
    for name, array in lora.arrays.items():
        assert np.array_equal(array, other.arrays[name])
        np.testing.assert_allclose(array, expected.arrays[name], atol=1e-5)


def test_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    def cut(training: Trainer) -> list[StepMetrics]:
        steps = list(training.run())
        assert training.stopped
        if training.ranks.rank == 0:
            training.save(tmp_path / "c.safetensors", training.state())
        return steps

    def rest(training: Trainer) -> list[StepMetrics]:
        training.resume(tmp_path / "c.safetensors")
        training.check_same_step()
        return list(training.run())

    (first, _), (second, _) = on_two_ranks(cut, stop_at=3, dropout=0.3)
    assert [step.step for step in first] == [step.step for step in second] == [1, 2, 3]
    (whole, expected), _ = on_two_ranks(lambda training: list(training.run()), dropout=0.3)
    (last, found), _ = on_two_ranks(rest, dropout=0.3)
    assert [s.loss for s in (*first, *last)] == [s.loss for s in whole]
    assert all(np.array_equal(found.arrays[name], one) for name, one in expected.arrays.items())


def test_ranks_that_resumed_after_other_steps() -> None:
    training, _ = trainer(gather=lambda payload: [payload, b"3"])
    with pytest.raises(EnvironmentFault, match=r"the ranks have resumed after steps \[0, 3\]"):
        training.check_same_step()


def test_large_gradients_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole, _), _ = on_two_ranks(lambda training: list(training.run()))
    monkeypatch.setattr("lite_runner.training.trainer.BUCKET", 256)
    (parts, _), _ = on_two_ranks(lambda training: list(training.run()))
    assert [step.loss for step in parts] == [step.loss for step in whole]


def test_packed_texts_do_not_see_each_other() -> None:
    texts = examples(MODEL.vocab_size)
    packed, _ = trainer([texts[:3], texts[3:6]], batch_size=1, shuffle=False)
    alone, _ = trainer(batch_size=3, shuffle=False)
    found, expected = (
        [next(stepping).loss for _ in range(2)] for stepping in (packed.run(), alone.run())
    )
    assert found == expected


def test_training_ends_when_nothing_is_gained() -> None:
    given: dict[str, Any] = {"eval_data": "x", "eval_steps": 2, "early_stop": 2, "steps": 40}
    training, _ = trainer(learning_rate=0.0, **given)
    steps = list(training.run())
    assert (training.best_step, training.done) == (2, 6)
    assert [step.step for step in steps if step.eval_loss is not None] == [2, 4, 6]
    better, _ = trainer(learning_rate=0.01, **{**given, "steps": 8})
    assert len(list(better.run())) == better.best_step == 8
    assert better.best_loss < training.best_loss
    later, _ = trainer(learning_rate=0.0, **given)  # steps of another training gain nothing here
    moments = later.optimizer.first, later.optimizer.second
    later.resume_from(
        20, [{name: in_memory(one) for name, one in some.items()} for some in moments]
    )
    assert len(list(later.run())) == 6 and later.done == 26


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_training_is_the_same_to_the_bit(stop: int, tmp_path: Path) -> None:
    whole, expected = trainer(dropout=0.3, schedule="cosine")
    losses = [step.loss for step in whole.run()]
    cut, _ = trainer(dropout=0.3, schedule="cosine")
    stepping = cut.run()
    for _ in range(stop):
        next(stepping)
    cut.save(tmp_path / "c.safetensors", cut.state())
    stepping.close()
    again, found = trainer(dropout=0.3, schedule="cosine")
    again.resume(tmp_path / "c.safetensors")
    assert [step.loss for step in again.run()] == losses[stop:]
    assert all(np.array_equal(found.arrays[name], one) for name, one in expected.arrays.items())


def test_a_checkpoint_of_another_training(tmp_path: Path) -> None:
    training, _ = trainer()
    training.save(tmp_path / "c.safetensors", training.state())
    other, _ = trainer()
    other.identity = "y"
    with pytest.raises(ArtifactError, match="a checkpoint of another model, data or settings"):
        other.resume(tmp_path / "c.safetensors")


def test_a_checkpoint_of_a_later_step_than_the_last(tmp_path: Path) -> None:
    training, _ = trainer()
    list(training.run())
    training.save(tmp_path / "c.safetensors", training.state())
    training, lora = trainer()
    training.resume(tmp_path / "c.safetensors")  # interrupted after the last step
    assert list(training.run()) == []
    training, lora = trainer()
    training.steps, before = 1, {name: one.copy() for name, one in lora.arrays.items()}
    with pytest.raises(ConfigError, match=r"saved after step 6, got finetune.steps=1"):
        training.resume(tmp_path / "c.safetensors")
    assert all(np.array_equal(before[name], one) for name, one in lora.arrays.items())


def test_a_loss_that_is_no_number_ends_it() -> None:
    training, lora = trainer()
    next(iter(lora.arrays.values()))[...] = np.nan
    with pytest.raises(NonFiniteError, match="step 1: the loss is nan"):
        next(training.run())


def test_all_weights_are_trained() -> None:
    weights = {name: one.copy() for name, one in weights_of("llama").items()}
    before = {name: one.copy() for name, one in weights.items()}
    network = TrainedNetwork(MODEL, weights, weights, {})
    given = {**OPTIONS, "steps": 8, "learning_rate": 0.01, "full": True}
    packs = [[text] for text in examples(MODEL.vocab_size)[:4]]
    training = Trainer(network, packs, options(given), seed=0)
    losses = [step.loss for step in training.run()]
    assert losses[-1] < losses[0] / 2
    assert all(not np.array_equal(before[name], one) for name, one in weights.items())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.0, 0.5, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rates_are_those_of_transformers(
    schedule: Schedule, expected: list[float]
) -> None:
    found = [rate(schedule, 1.0, step, 6, 2) for step in range(6)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_gradients_are_clipped_together() -> None:
    gradients = {"a": np.array([3.0], np.float32), "b": np.array([4.0], np.float32)}
    assert clipped(gradients, 0.0) == clipped(gradients, 10.0) == 5.0
    assert gradients["a"][0] == 3.0
    assert clipped(gradients, 1.0) == 5.0
    assert [one[0] for one in gradients.values()] == pytest.approx([0.6, 0.8], rel=1e-6)


def test_adamw_equals_pytorch() -> None:
    """Two steps of torch.optim.AdamW([[1, -2]], lr=0.1, weight_decay=0.5), and of a vector, as of
    norms and biases, which does not decay."""
    weights = {"w": np.array([[1.0, -2.0]], np.float32), "b": np.array([1.0, -2.0], np.float32)}
    optimizer = AdamW(weights, 0.5)

    def step(*gradient: float) -> None:
        array = np.array(gradient, np.float32)
        optimizer.step({"w": array[None], "b": array}, 0.1)

    step(0.5, -1.0)
    assert weights["w"][0] == pytest.approx([0.85, -1.8], abs=1e-6)
    assert weights["b"] == pytest.approx([0.9, -1.9], abs=1e-6)
    step(-0.25, 3.0)
    first = np.array([0.9 * 0.05 - 0.025, -0.09 + 0.3]) / (1 - 0.81)
    second = np.array([0.999 * 0.00025 + 0.0000625, 0.999 * 0.001 + 0.009]) / (1 - 0.999**2)
    change = 0.1 * first / (np.sqrt(second) + 1e-8)
    assert weights["w"][0] == pytest.approx(np.array([0.85, -1.8]) * 0.95 - change, abs=1e-5)
    assert weights["b"] == pytest.approx(np.array([0.9, -1.9]) - change, abs=1e-5)
