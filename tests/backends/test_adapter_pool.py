"""Which adapters are loaded when, and what they take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from lite_runner.backends.adapter_pool import AdapterPool, pool_size
from lite_runner.backends.device import set_device
from lite_runner.errors import RunnerError
from lite_runner.models.lora import EmbeddingLora, Lora, LoraSize
from lite_runner.weights.adapter import Adapter, LoraPair
from lite_runner.weights.tensor import LazyTensor

set_device("CPU", 0)  # before the first operator: later tests of the process want to do it again

LAYERS = {"q": (6, 4), "k": (6, 2)}  # name -> [in, out]
TABLE, VOCABULARY, HIDDEN = "table", 5, 3


class Network(nn.Cell):
    def __init__(self, size: LoraSize) -> None:
        super().__init__()
        dtype = Tensor(np.zeros(1, np.float32)).dtype
        self.lora = Lora(size, LAYERS, dtype)
        self.embedding = EmbeddingLora(size, TABLE, (VOCABULARY, HIDDEN), dtype)


def adapter(number: int, rank: int, *names: str) -> Adapter:
    """A is full of `number`, B of 10 * `number`; the scale is 0.5."""

    def filled(value: float, *shape: int) -> LazyTensor:
        return LazyTensor(shape, "F32", lambda: np.full(shape, value, np.float32))

    widths = LAYERS | {TABLE: (VOCABULARY, HIDDEN)}
    pairs = {
        name: LoraPair(
            filled(number, rank, widths[name][0]), filled(10 * number, widths[name][1], rank), 0.5
        )
        for name in names
    }
    return Adapter(f"a{number}", Path(), pairs)


def pool_of(adapters: list[Adapter], places: int) -> tuple[AdapterPool, Network]:
    size = pool_size(adapters, places)
    network = Network(size)
    return AdapterPool(network, adapters, size), network


def values(parameter: Parameter, places: int) -> np.ndarray:
    """[.., places, R, width]."""
    array = parameter.asnumpy()
    return array.reshape(-1, places, 4, array.shape[1])


def test_ranks_are_filled_up_and_what_was_there_before_is_gone() -> None:
    adapters = [adapter(1, 4, "q", "k", TABLE), adapter(2, 1, "k"), adapter(3, 2, "q")]
    pool, network = pool_of(adapters, 2)
    assert pool.places_of([1, 0, 2]) == [0, 2, 1]
    a, b = network.lora.a, network.lora.b
    assert (values(a, 2)[:, 0] == 1).all() and (values(b[0], 2)[0, 0] == 5).all()
    assert values(a, 2)[:, 1].any(-1).tolist() == [[False] * 4, [True] + [False] * 3]
    pool.keep([2])
    assert pool.places_of([3]) == [0]
    assert values(a, 2)[:, 0].any(-1).tolist() == [[True, True, False, False], [False] * 4]
    assert values(b[0], 2)[0, 0].tolist() == [[15.0] * 4] * 2 + [[0.0] * 4] * 2
    assert not values(b[1], 2)[0, 0].any()
    assert not network.embedding.a.asnumpy().any() and not network.embedding.b.asnumpy().any()


def test_the_least_recently_used_makes_room_unless_it_is_kept() -> None:
    pool, _ = pool_of([adapter(number, 1, "q") for number in (1, 2, 3, 4)], 2)
    pool.places_of([1])
    pool.places_of([2])
    pool.places_of([1])
    assert pool.places_of([3]) == [1] and pool.loads == 3  # in place of 2
    assert pool.places_of([1, 3, 0, 1]) == [0, 1, 2, 0] and pool.loads == 3
    pool.keep([1])
    assert pool.places_of([4]) == [1] and pool.loads == 4  # 1 is older than 3, and kept
    with pytest.raises(RunnerError, match="all 2 adapters that can be loaded are in use"):
        pool.places_of([1, 2, 4])


@pytest.mark.parametrize("count", [1, 16, 256])
def test_memory_grows_with_the_pool_and_not_with_the_adapters(count: int) -> None:
    adapters = [adapter(number, 4, "q", "k", TABLE) for number in range(1, count + 1)]
    pool, _ = pool_of(adapters, 8)
    per_place = 4 * 4 * (6 + 4 + 6 + 2 + VOCABULARY + HIDDEN)  # bytes, rank, in and out
    assert pool.nbytes == min(count, 8) * per_place
    for number in range(1, count + 1):
        pool.places_of([number])
    assert pool.loads == count and pool.nbytes == min(count, 8) * per_place


def test_rows_of_a_step_have_equal_parts_in_its_time() -> None:
    pool, _ = pool_of([adapter(1, 1, "q"), adapter(2, 1, "q")], 2)
    pool.spent(4.0, [1, 0, 1, 2])
    pool.spent(1.0, [2])
    assert pool.seconds == [1.0, 2.0, 2.0]
