"""Ranks that share a model train the adapter that one process trains; here they are threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.config.sections import Ranks
from lite_runner.training import trainer as trainer_module
from lite_runner.training.adapter import TrainedLora, new_lora
from lite_runner.training.network import TrainedNetwork
from lite_runner.training.options import LoraOptions
from lite_runner.training.shard import ModelShard
from lite_runner.training.trainer import Gather, StepMetrics, Trainer
from tests.each import each
from tests.models import reference_model
from tests.training.options import OPTIONS
from tests.training.test_network import examples, options, weights_of

Payload = TypeVar("Payload")
# Between them they have all that a shard may have.
CASES = ("bloom", "cohere", "falcon", "gemma2", "gpt2", "llama", "mixtral", "qwen3", "starcoder2")


class Meeting:
    """An all-gather between threads."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=60)
        self._payloads: list[Any] = [None] * count

    def gather(self, index: int, own: Payload) -> list[Payload]:
        self._payloads[index] = own
        self._barrier.wait()
        found = [*self._payloads]
        self._barrier.wait()
        return found


def trained(
    case: str, ranks: Ranks, gather: Gather, shard: ModelShard | None, **changes: Any
) -> tuple[list[StepMetrics], TrainedLora]:
    """Two steps of a model's adapter, or with full=True of the model, by 6 examples each; what was
    trained is whole on rank 0."""
    model, weights = reference_model(case), weights_of(case)
    asked: dict[str, Any] = {
        "r": 4,
        "alpha": 8.0,
        "dropout": 0.3,
        "targets": "all-linear",
        "rslora": False,
    }
    lora = new_lora(model, LoraOptions(**asked), 0)
    if shard is not None:
        weights = {name: one[shard.bounds(name)] for name, one in weights.items()}
    if changes.get("full"):
        weights = {name: one.copy() for name, one in weights.items()}
        lora = TrainedLora(weights, {})
    recomputes = changes.pop("checkpoint", False)
    network = TrainedNetwork(
        model, weights, lora.arrays, lora.deltas, recomputes=recomputes, shard=shard
    )
    given = {**OPTIONS, "steps": 2, "batch_size": 6, "learning_rate": 0.01, "lora": asked}
    texts = examples(model.vocab_size)
    trainer = Trainer(
        network,
        [[text] for text in texts],
        options(given | changes | {"eval_data": "x", "eval_steps": 2}),
        evaluated=texts[:5],
        seed=1,
        threads=1,
        ranks=ranks,
        gather=gather,
    )
    steps = list(trainer.run())
    return steps, TrainedLora(trainer.state()[0], lora.deltas)


def on_ranks(case: str, **changes: Any) -> list[tuple[list[StepMetrics], TrainedLora]]:
    """The results of two ranks that share a model, for each of `data` replicas."""
    data = changes.pop("data", 1)
    world, replicas = Meeting(2 * data), [Meeting(2) for _ in range(data)]

    def rank(index: int) -> tuple[list[StepMetrics], TrainedLora]:
        ranks = Ranks(index, data=data, tensor=2)

        def all_gather(own: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.stack(replicas[ranks.data_index].gather(ranks.tensor_index, own))

        def gather(payload: bytes) -> list[bytes]:
            return world.gather(index, payload)

        shard = ModelShard(reference_model(case), ranks, all_gather)
        return trained(case, ranks, gather, shard, **changes)

    with ThreadPoolExecutor(2 * data) as pool:
        return list(pool.map(rank, range(2 * data)))


@each(("case", "full"), [(case, full) for full in (False, True) for case in CASES])
def test_ranks_train_as_one_process(case: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A gradient that is rounding moves its parameter as far as any other, and each processor
    # rounds its own way.
    monkeypatch.setattr(trainer_module, "EPS", 1e-3)
    expected, one = trained(case, Ranks(), lambda payload: [payload], None, full=full)
    (steps, lora), (others, other) = on_ranks(case, full=full)
    for name in ("loss", "grad_norm", "eval_loss"):
        values, found, same = (
            [getattr(step, name) for step in some if getattr(step, name) is not None]
            for some in (expected, steps, others)
        )
        assert found == same
        assert found == pytest.approx(values, rel=1e-4)
    second = ModelShard(reference_model(case), Ranks(1, tensor=2), np.asarray)
    for name, array in lora.arrays.items():
        # The rank that writes nothing has its parts alone.
        held = array[second.bounds(name)] if full else array
        assert np.array_equal(held, other.arrays[name])
        np.testing.assert_allclose(array, one.arrays[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("full", [False, True])
def test_two_replicas_of_two_ranks(full: bool) -> None:
    expected, _ = trained("llama", Ranks(), lambda payload: [payload], None, full=full)
    found = on_ranks("llama", data=2, batch_size=3, full=full)
    losses = [[step.loss for step in steps] for steps, _ in found]
    assert all(one == losses[0] for one in losses)
    assert losses[0] == pytest.approx([step.loss for step in expected], rel=1e-5)


def test_a_recomputed_block_asks_the_ranks_again() -> None:
    (kept, _), _ = on_ranks("llama")
    (again, _), _ = on_ranks("llama", checkpoint=True)
    assert [step.loss for step in again] == [step.loss for step in kept]
